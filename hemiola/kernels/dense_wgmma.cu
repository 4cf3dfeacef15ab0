// A few tokens' products with FP8 or bfloat16 weights, which memory bounds: Hopper's wgmma, both from shared memory.
//
// Tokens are the 64 rows of a product and rows of weights its columns, of which there may be any multiple of eight: so
// blocks get even shares of the weights, whatever their number of rows. Rows of the first operand past TOKENS are
// whatever shared memory holds there; a row of sums depends on its own row alone, and those are not written.
//
// A block takes all tokens, TOKENS at most, times ROWS rows of weights. Steps of 128 bytes of each row go through two
// rings, of X_STAGES and of STAGES, which the tensor memory accelerator fills, with 128-byte swizzle, and with zeros past
// the end of rows and columns. One thread fetches weights, from the kernel's start, one fetches x, once the kernel before
// has ended; a warpgroup multiplies for each 64 tokens.
//
// With SPLITS > 1 a cluster of so many blocks shares out the columns of its rows. Each writes its sums to the shared
// memory of whoever adds them, which has eighths of ROWS of its own; they are added in the blocks' order.
//
// A sum's order depends on SPLITS alone. Nothing is kept between launches, and no memory but `out` is written.
//
// Behind wgmma.cuh. Defined from outside: TOKENS, ROWS, multiples of 8; SPLITS, STAGES, X_STAGES; and product(), see
// dense_wgmma.py.

struct alignas(16) f32x4 { float x, y, z, w; };
struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int GROUPS = (TOKENS + 63) / 64, MULTIPLIERS = 128 * GROUPS, THREADS = MULTIPLIERS + 64;
constexpr int WEIGHT_WARP = MULTIPLIERS / 32, X_WARP = WEIGHT_WARP + 1;
constexpr u32 X_BYTES = TOKENS * 128, WEIGHT_BYTES = ROWS * 128, ALL_X_BYTES = X_STAGES * X_BYTES;
constexpr u32 RING_BYTES = ALL_X_BYTES + STAGES * WEIGHT_BYTES;
// A piece is eight rows. PIECES: the most that a block adds. A token's sums lie PITCH floats apart, an odd multiple of
// eight, so that neither pairs nor fours of them meet in a bank.
constexpr int ALL_PIECES = ROWS / 8, PIECES = (ALL_PIECES + SPLITS - 1) / SPLITS, PITCH = (PIECES | 1) * 8;
constexpr u32 SUM_BYTES = SPLITS * TOKENS * PITCH * 4;  // in the ring's place without SPLITS
constexpr u32 SUMS_AT = SPLITS > 1 ? RING_BYTES : 0, SUMS_END = SUMS_AT + SUM_BYTES;
constexpr u32 BARRIERS_AT = SUMS_END < RING_BYTES ? RING_BYTES : SUMS_END;
static_assert(TOKENS % 8 == 0 && TOKENS <= 256 && ROWS % 8 == 0 && ROWS <= 256, "a copy's and a product's");
static_assert(GROUPS * 64 * 128 - X_BYTES <= STAGES * WEIGHT_BYTES, "rows past the tokens are still in the rings");

// ------------------------------------------------------------------------------------------------ instructions

// A box of the map from this column and row on.
__device__ __forceinline__ void copy(u32 to, const TensorMap &map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void sync_multipliers() {
    asm volatile("bar.sync 1, %0;" :: "n"(MULTIPLIERS) : "memory");
}

// ---------------------------------------------------------------------------------------------------- a block

// What a block does.
struct Item {
    int split, first_row, first_step, steps;

    __device__ __forceinline__ Item(int all_steps) {
        split = blockIdx.x % SPLITS;  // its rank in the cluster
        first_row = blockIdx.x / SPLITS * ROWS;
        first_step = all_steps * split / SPLITS;
        steps = all_steps * (split + 1) / SPLITS - first_step;
    }
};

using XRing = PlaceRing<X_BYTES, X_STAGES>;
using WeightRing = PlaceRing<WEIGHT_BYTES, STAGES>;

// By one thread: steps first .. last, counted from the item's.
__device__ __forceinline__ void fetch_weights(WeightRing &ring, const TensorMap &map, const Item &item, int first,
                                              int last) {
    for (int step = first; step < last; step++) {
        if (first > 0) ring.wait_empty();
        arrive_and_expect(ring.full(), WEIGHT_BYTES);
        copy(ring.at(), map, (item.first_step + step) * 128, item.first_row, ring.full());
        ring.step();
    }
}

__device__ __forceinline__ void fetch_x(XRing ring, const TensorMap &map, const Item &item) {
    for (int step = 0; step < item.steps; step++) {
        ring.wait_empty();
        arrive_and_expect(ring.full(), X_BYTES);
        copy(ring.at(), map, (item.first_step + step) * 128, 0, ring.full());
        ring.step();
    }
}

// By a warp that multiplies.
__device__ __forceinline__ void give_back(u32 empty) {
    if (threadIdx.x % 32 == 0) arrive(empty);
}

// Sums of 64 tokens and the block's rows, as wgmma has them.
__device__ __forceinline__ void multiply(float (&acc)[ROWS / 2], XRing x_ring, WeightRing weight_ring, int steps) {
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.f;
    pin(acc);
    u32 last_x = 0, last_weights = 0;
    for (int step = 0; step < steps; step++) {
        weight_ring.wait_full();
        x_ring.wait_full();
        // The same in all lanes, which lets them stay in uniform registers.
        const u32 x_at = __shfl_sync(0xFFFFFFFFu, x_ring.at() + threadIdx.x / 128 * (64 * 128), 0);
        const u32 weights_at = __shfl_sync(0xFFFFFFFFu, weight_ring.at(), 0);
        const u64 x = operand(x_at), weights = operand(weights_at);
        open_products();
#pragma unroll
        for (int i = 0; i < 4; i++) product(acc, x + i * 2, weights + i * 2);  // 32 bytes of each row
        close_products();
        wait_for_products<1>();
        if (step > 0) {
            give_back(last_x);
            give_back(last_weights);
        }
        last_x = x_ring.empty();
        last_weights = weight_ring.empty();
        x_ring.step();
        weight_ring.step();
    }
    wait_for_products<0>();
    pin(acc);
}

// A warp's sums to those who add them: of a block's sums, by the block they come from, token and own piece.
__device__ __forceinline__ void hand_out(const float (&acc)[ROWS / 2], int split, int num_tokens, u32 sums) {
    const int lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16 + lane / 4;
    const u32 to = sums + (split * TOKENS + token) * (PITCH * 4) + lane % 4 * 8;
#pragma unroll
    for (int piece = 0; piece < ALL_PIECES; piece++) {
        const int owner = ((piece + 1) * SPLITS - 1) / ALL_PIECES;  // whose pieces end behind it, the first
        const u32 own_to = SPLITS > 1 ? address_in(to, owner) : to;
        const u32 at = own_to + (piece - ALL_PIECES * owner / SPLITS) * 32;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (token + i * 8 < num_tokens)
                asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                             :: "r"(at + i * (8 * PITCH * 4)), "f"(acc[piece * 4 + i * 2]),
                                "f"(acc[piece * 4 + i * 2 + 1]) : "memory");
    }
}

// The sums of all blocks for the block's own pieces, finished and written.
__device__ __forceinline__ void write(const Item &item, const float *sums, void *out, float alpha, float out_scale,
                                      int num_tokens, int num_rows, int flags) {
    const int first = ALL_PIECES * item.split / SPLITS, own = ALL_PIECES * (item.split + 1) / SPLITS - first;
    const float inverse = __fdiv_rn(1.f, out_scale);
    for (int i = threadIdx.x; i < num_tokens * PIECES; i += MULTIPLIERS) {
        const int token = i / PIECES, piece = i % PIECES, row = item.first_row + (first + piece) * 8;
        if (piece >= own || row >= num_rows) continue;
        const f32x4 *from = (const f32x4 *)(sums + token * PITCH + piece * 8);
        f32x4 low = from[0], high = from[1];
#pragma unroll
        for (int block = 1; block < SPLITS; block++) {
            const f32x4 *other = from + block * (TOKENS * PITCH / 4);
            const f32x4 a = other[0], b = other[1];
            low.x += a.x; low.y += a.y; low.z += a.z; low.w += a.w;
            high.x += b.x; high.y += b.y; high.z += b.z; high.w += b.w;
        }
        const bool relu_squared = flags & 1;
        const u32x4 v{finished(low.x * alpha, low.y * alpha, relu_squared),
                      finished(low.z * alpha, low.w * alpha, relu_squared),
                      finished(high.x * alpha, high.y * alpha, relu_squared),
                      finished(high.z * alpha, high.w * alpha, relu_squared)};
        const i64 at = (i64)token * num_rows + row;
        if (flags & 4) {
            const u32x2 bytes{to_e4m3(v.x, out_scale, inverse) | to_e4m3(v.y, out_scale, inverse) << 16,
                              to_e4m3(v.z, out_scale, inverse) | to_e4m3(v.w, out_scale, inverse) << 16};
            *(u64 *)((u8 *)out + at) = bytes.x | (u64)bytes.y << 32;
        } else {
            *(u32x4 *)((u16 *)out + at) = v;
        }
    }
}

// x_map, weight_map: tensor maps of bytes, of boxes of 128 columns and TOKENS or ROWS rows, with 128-byte swizzle.
// There are SPLITS steps of 128 bytes at least, and TOKENS tokens at most; num_rows is a multiple of 8.
// flags: 1 squared ReLU, 4 quantised with out_scale to e4m3 (out is bytes then), 8 x is complete as soon as the kernel
// before this one lets this one begin: all but the writing is done beside it.
extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS, 1) dense_wgmma_kernel(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, void *out, float alpha,
    float out_scale, int num_tokens, int num_rows, int all_steps, int flags) {
    extern __shared__ u8 memory[];
    u8 *const base = memory + (-address_of(memory) & 1023);
    const Item item(all_steps);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ahead = min(item.steps, STAGES);
    const u32 barriers = address_of(base) + BARRIERS_AT;
    const XRing x_ring{address_of(base), barriers};
    WeightRing weight_ring{address_of(base) + ALL_X_BYTES, barriers + 16 * X_STAGES};
    if (threadIdx.x == WEIGHT_WARP * 32) {
        x_ring.prepare(1, MULTIPLIERS / 32);  // a warp that multiplies each
        weight_ring.prepare(1, MULTIPLIERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fetch_weights(weight_ring, weight_map, item, 0, ahead);
    }
    __syncthreads();
    if constexpr (SPLITS > 1) cluster_arrive_relaxed();  // nobody is written to before it has begun
    if (warp == WEIGHT_WARP) {
        if (lane == 0 && item.steps > ahead) fetch_weights(weight_ring, weight_map, item, ahead, item.steps);
        __syncwarp();
    } else if (warp == X_WARP) {
        if (!(flags & 8)) gdc_wait();
        if (lane == 0) fetch_x(x_ring, x_map, item);
        __syncwarp();
        gdc_wait();
        gdc_launch_dependents();
    } else {
        float acc[ROWS / 2];
        if (!(flags & 8)) gdc_wait();
        multiply(acc, x_ring, {address_of(base) + ALL_X_BYTES, barriers + 16 * X_STAGES}, item.steps);
        __syncwarp();
        if constexpr (SPLITS > 1) cluster_wait();
        else sync_multipliers();  // all have read the rings
        if (flags & 8) gdc_wait();
        hand_out(acc, item.split, num_tokens, address_of(base) + SUMS_AT);
    }
    if constexpr (SPLITS > 1) {
        if (warp >= WEIGHT_WARP) cluster_wait();
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
    if (warp < WEIGHT_WARP) {
        if constexpr (SPLITS == 1) sync_multipliers();
        write(item, (const float *)(base + SUMS_AT), out, alpha, out_scale, num_tokens, num_rows, flags);
    }
}
