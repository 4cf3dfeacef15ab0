// All pairs of tokens and FP8 experts, which memory bounds: weights go through shared memory into registers, where they are
// the A operand of Hopper's wgmma; a tile of pairs is its B operand. See grouped.cuh.
//
// One thread fetches weights by bulk copies, STEP tiles of each of four strips at a time, through a ring of STAGES. It waits
// for nothing but room, so memory does not rest while a block waits for something else. A warpgroup multiplies, a warp
// for each strip. X_WARPS others bring a tile's rows of x into the order of products, to one of X_BUFFERS places.
//
// Lane (g = lane / 4, t = lane % 4) reads 16 bytes of row g and of row g + 8 of a tile, those from 16 t on, as in
// rows_mma.cu. Their words i = 0 and 1 are its part of one product's weights, 2 and 3 of another's. So of the 64 bytes of
// x that a tile's columns meet word 4 t + i lies at 4 i + t: the four by four of them are transposed.
//
// A sum runs over the columns in order: it does not depend on the tile, or on a pair's neighbours.
//
// Behind wgmma.cuh and grouped.cuh. Defined from outside: STEP, STAGES, X_BUFFERS, X_WARPS, GROUPED_KERNEL (a name, by which
// a trace tells what it is for); and product(), see grouped_wgmma.py.

constexpr int WEIGHT_WARP = STRIPS, FIRST_X_WARP = STRIPS + 1, THREADS = 32 * (FIRST_X_WARP + X_WARPS);
constexpr int STEPS = (ROW_STEPS + STEP - 1) / STEP, LAST = ROW_STEPS - (STEPS - 1) * STEP;  // of a strip; tiles of the last
constexpr u32 STRIP_BYTES = STEP * TILE_BYTES, STAGE_BYTES = STRIPS * STRIP_BYTES;
constexpr u32 X_BYTES = (ROW_STEPS + 1) / 2 * BLOCK_BYTES, STEP_BYTES = STEP / 2 * BLOCK_BYTES;
constexpr int AT_ONCE = 8;  // quarters of x that a thread has under way
static_assert(STEP % 2 == 0, "a step is whole blocks of x");

// ------------------------------------------------------------------------------------------------ instructions

__device__ __forceinline__ void copy(u32 to, const u8 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ u32x4 load_four(u32 at) {
    u32x4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// ---------------------------------------------------------------------------------------------------- a block

using WeightRing = PlaceRing<STAGE_BYTES, STAGES>;
using XRing = PlaceRing<X_BYTES, X_BUFFERS>;

// By a warp that multiplies.
__device__ __forceinline__ void give_back(u32 empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty);
}

// By one thread.
__device__ __forceinline__ void fetch_weights(WeightRing ring, Shares shares, const u8 *codes) {
    Share share;
    while (shares.next(share)) {
        const u8 *first = codes + ((i64)share.expert * shares.strips + share.first) * (ROW_STEPS * TILE_BYTES);
        for (int strip = 0; strip < share.count; strip += STRIPS) {
            const int strips = min(STRIPS, share.count - strip);
            const u8 *from = first;
            for (int step = 0; step < STEPS; step++) {
                const u32 bytes = (step + 1 < STEPS ? STEP : LAST) * TILE_BYTES;
                ring.wait_empty();
                arrive_and_expect(ring.full(), strips * bytes);
                for (int i = 0; i < strips; i++)
                    copy(ring.at() + i * STRIP_BYTES, from + i * (ROW_STEPS * TILE_BYTES), bytes, ring.full());
                from += STRIP_BYTES;
                ring.step();
            }
            first += STRIPS * ROW_STEPS * TILE_BYTES;
        }
    }
}

// What of a row of x meets a tile of weights: a lane's quarter of it, as 16 bytes. CODES: x is e4m3 already.
template <bool CODES>
struct Quarter {
    u32x4 v;

    __device__ __forceinline__ void load(const u8 *row, int step, int columns, float scale) {
        const int column = (step * 4 + threadIdx.x % 4) * 16;
        if (CODES) {
            u32x2 low = {0, 0}, high = {0, 0};
            if (column < columns) low = *(const u32x2 *)(row + column);
            if (column + 8 < columns) high = *(const u32x2 *)(row + column + 8);
            v = {low.x, low.y, high.x, high.y};
        } else {
            const float inverse = __frcp_rn(scale);
            u32x4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
            if (column < columns) low = *(const u32x4 *)(row + 2 * column);
            if (column + 8 < columns) high = *(const u32x4 *)(row + 2 * column + 16);
            v.x = to_e4m3(low.x, scale, inverse) | to_e4m3(low.y, scale, inverse) << 16;
            v.y = to_e4m3(low.z, scale, inverse) | to_e4m3(low.w, scale, inverse) << 16;
            v.z = to_e4m3(high.x, scale, inverse) | to_e4m3(high.y, scale, inverse) << 16;
            v.w = to_e4m3(high.z, scale, inverse) | to_e4m3(high.w, scale, inverse) << 16;
        }
    }

    __device__ __forceinline__ void store(u32 row_at, int step, int g) const {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            store_one(row_at + step / 2 * BLOCK_BYTES + ((step % 2 * 4 + i) ^ g) * 16 + threadIdx.x % 4 * 4, words[i]);
    }
};

// A lane's weights of a stage, on their way from the ring.
struct Stage {
    u32x4 upper[STEP], lower[STEP];

    template <int N>
    __device__ __forceinline__ void load(const WeightRing &ring) {
        ring.wait_full();
        const u32 from = ring.at() + threadIdx.x / 32 * STRIP_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
        for (int i = 0; i < N; i++) {
            upper[i] = load_four(from + i * TILE_BYTES);
            lower[i] = load_four(from + i * TILE_BYTES + 512);
        }
    }
};

// Adds the products of a stage's N tiles, which have been loaded, to a warpgroup's sums for 64 rows of weights, as wgmma
// has them, and loads NEXT tiles of the stage behind it meanwhile.
template <int N, int NEXT>
__device__ __forceinline__ void add(float (&acc)[SUMS], Stage &stage, WeightRing &ring, u32 x) {
    const u64 columns = operand(uniform(x));
    u32 a[N][2][4];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32x4 upper = stage.upper[i], lower = stage.lower[i];
        a[i][0][0] = upper.x, a[i][0][1] = lower.x, a[i][0][2] = upper.y, a[i][0][3] = lower.y;
        a[i][1][0] = upper.z, a[i][1][1] = lower.z, a[i][1][2] = upper.w, a[i][1][3] = lower.w;
    }
    pin(a);
    give_back(ring.empty());
    ring.step();
    open_products();
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int p = 0; p < 2; p++)
            product(acc, a[i][p], columns + (i / 2 * (BLOCK_BYTES >> 4) + i % 2 * 4 + p * 2));
    close_products();
    if constexpr (NEXT > 0) stage.load<NEXT>(ring);
    wait_for_products<0>();
    pin(a);
    pin(acc);
}

// The sums of four strips.
__device__ __forceinline__ void multiply(float (&acc)[SUMS], WeightRing &ring, u32 x) {
#pragma unroll
    for (int i = 0; i < SUMS; i++) acc[i] = 0.f;
    pin(acc);
    Stage stage;
    stage.load<(STEPS > 1 ? STEP : LAST)>(ring);
#pragma unroll 1
    for (int step = 0; step < STEPS - 2; step++) add<STEP, STEP>(acc, stage, ring, x + step * STEP_BYTES);
    if constexpr (STEPS > 1) add<STEP, LAST>(acc, stage, ring, x + (STEPS - 2) * STEP_BYTES);
    add<LAST, 0>(acc, stage, ring, x + (STEPS - 1) * STEP_BYTES);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) GROUPED_KERNEL(
    const u8 *x, i64 x_stride, const u8 *codes, const u8 *scales, const float *alpha, const int *sorted_pairs,
    const int *experts, const int *num_tiles, const float *pair_weights, void *out, float *pieces,
    const float *input_scales, const float *out_scales, int num_pairs, int pairs_per_x, int top_k, int num_shared,
    int num_experts, int num_rows, int columns, int flags) {
    const Given given{x, x_stride, codes, scales, alpha, sorted_pairs, experts, num_tiles, pair_weights, out, pieces,
                      input_scales, out_scales, num_pairs, pairs_per_x, top_k, num_shared, num_experts, num_rows, columns,
                      flags};
    extern __shared__ u8 memory[];
    __shared__ alignas(8) u64 weight_barriers[2 * STAGES], x_barriers[2 * X_BUFFERS];
    __shared__ Tokens tokens[X_BUFFERS];
    const u32 base = address_of(memory) + (-address_of(memory) & 1023);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    XRing x_ring{base, address_of(x_barriers)};
    WeightRing ring{base + X_BUFFERS * X_BYTES, address_of(weight_barriers)};
    if (threadIdx.x == 0) {
        x_ring.prepare(X_WARPS, STRIPS);  // a warp that multiplies each
        ring.prepare(1, STRIPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (!(flags & 8)) gdc_wait();
    Shares shares(given);
    Share share;
    if (warp == WEIGHT_WARP) {
        if (lane == 0) fetch_weights(ring, shares, codes);
    } else if (warp >= FIRST_X_WARP) {
        gdc_wait();
        gdc_launch_dependents();
        while (shares.next(share)) {
            const int pair = pair_of(given, share, lane), row = pair < num_pairs ? pair / pairs_per_x : 0;
            const int count = __popc(__ballot_sync(0xFFFFFFFFu, pair < num_pairs));
            const auto open = [&] {
                x_ring.wait_empty();
                if (warp == FIRST_X_WARP && lane < TOKENS) tokens[x_ring.stage].set(given, lane, pair, share.expert);
            };
            if (input_scales == nullptr)
                bring_x<Quarter<true>, X_WARPS, AT_ONCE>(given, x_ring.at(), warp - FIRST_X_WARP, count, row, x_stride,
                                                         1.f, open);
            else
                bring_x<Quarter<false>, X_WARPS, AT_ONCE>(given, x_ring.at(), warp - FIRST_X_WARP, count, row,
                                                          2 * x_stride, input_scales[share.expert], open);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads it
            __syncwarp();
            if (lane == 0) arrive(x_ring.full());
            x_ring.step();
        }
    } else {
        bool has_waited = false;
        while (shares.next(share)) {
            x_ring.wait_full();
            for (int strip = 0; strip < share.count; strip += STRIPS) {
                float acc[SUMS];
                multiply(acc, ring, x_ring.at());
                if (!has_waited) gdc_wait();  // before anything is written
                has_waited = true;
                if (strip + warp < share.count) write(given, share, tokens[x_ring.stage], acc, strip + warp, TOKENS);
            }
            give_back(x_ring.empty());
            x_ring.step();
        }
    }
}
