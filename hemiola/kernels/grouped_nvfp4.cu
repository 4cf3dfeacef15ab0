// All pairs of tokens and NVFP4 experts: weights go from memory straight into registers, are decoded there, and are the A
// operand of Hopper's wgmma; a tile of pairs, in shared memory, is its B operand. See grouped.cuh.
//
// Four strips at a time are a warpgroup's, a warp for each. WARPGROUPS share out the steps of a share evenly, and what one has
// of four strips that the one before it has begun it leaves to that one. DEPTH steps are under way, a unit.
//
// Lane (g = lane / 4, t = lane % 4) reads 16 bytes of row g and of row g + 8 of a tile, those from 16 t on: four words, of
// which each makes two products' weights. So x lies in parts of 64 bytes, one for each word of a lane, in which what
// pair i of codes of lane t meets is at 16 i + 4 t.
//
// Behind wgmma.cuh, nvfp4.cuh and grouped.cuh. Defined from outside: WARPGROUPS, DEPTH, AT_A_TIME (words of a lane that are
// multiplied at a time), GROUPED_KERNEL (a name, by which a trace tells what it is for); and product(), see
// grouped_wgmma.py.

constexpr int THREADS = WARPGROUP * WARPGROUPS, WARPS = STRIPS * WARPGROUPS;
constexpr int UNITS = (ROW_STEPS + DEPTH - 1) / DEPTH;  // of a strip
constexpr u32 SCALE_BYTES = 128, X_BYTES = 2 * ROW_STEPS * BLOCK_BYTES;
constexpr int AT_ONCE = 2;  // quarters of x that a thread has under way
constexpr int FIRST = DEPTH < 5 ? DEPTH : 5;  // tiles that it has beside these

// ------------------------------------------------------------------------------------------------ instructions

__device__ __forceinline__ u32x4 load_codes(const u8 *p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ u32x2 load_scales(const u8 *p) {
    u32x2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// ---------------------------------------------------------------------------------------------------- a block

// A lane's words of a tile: of rows g and g + 8, with the scales of their group of 64 columns.
struct Tile {
    u32x4 upper, lower;
    u32x2 scales;

    __device__ __forceinline__ void load(const u8 *codes_at, const u8 *scales_at) {
        upper = load_codes(codes_at);
        lower = load_codes(codes_at + 512);
        scales = load_scales(scales_at);
    }
};

// What of a row of x meets a tile of weights: a lane's quarter of it.
struct Quarter {
    u32x4 v[2][2];  // by group of 64 columns: eight from 8 t on, and from 8 t + 32 on

    __device__ __forceinline__ void load(const u8 *row, int step, int columns, float) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = step * 128 + i * 32 + threadIdx.x % 4 * 8;
            v[i / 2][i % 2] = {0, 0, 0, 0};
            if (column < columns) v[i / 2][i % 2] = *(const u32x4 *)(row + 2 * column);
        }
    }

    // Columns i of both eights, 32 apart, are of one word.
    __device__ __forceinline__ void store(u32 row_at, int step, int g) const {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32x4 low = v[i / 8][0], high = v[i / 8][1];
            const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
            const u32 word = __byte_perm(lows[i % 8 / 2], highs[i % 8 / 2], i % 2 ? 0x7632 : 0x5410);
            const int part = i % 4, chunk = part % 2 * 4 + threadIdx.x % 4;
            store_one(row_at + (step * 2 + part / 2) * BLOCK_BYTES + (chunk ^ g) * 16 + i / 4 * 4, word);
        }
    }
};

// Adds a tile's products to a warpgroup's sums for 64 rows of weights, as wgmma has them: while the tensor cores work on
// AT_A_TIME words, the next ones are decoded.
__device__ __forceinline__ void add(float (&acc)[SUMS], u32 (&a)[2][2 * AT_A_TIME][4], const Tile &tile, u64 columns) {
    const u32 upper[4] = {tile.upper.x, tile.upper.y, tile.upper.z, tile.upper.w};
    const u32 lower[4] = {tile.lower.x, tile.lower.y, tile.lower.z, tile.lower.w};
    u32 u0, u1, l0, l1;
    spread(tile.scales.x, u0, u1);
    spread(tile.scales.y, l0, l1);
#pragma unroll
    for (int q = 0; q < 4; q += AT_A_TIME) {
        u32 (&own)[2 * AT_A_TIME][4] = a[q / AT_A_TIME % 2];
#pragma unroll
        for (int j = 0; j < AT_A_TIME; j++) {
            u32 u[4], l[4];
            decode(upper[q + j], u0, u1, u);
            decode(lower[q + j], l0, l1, l);
#pragma unroll
            for (int p = 0; p < 2; p++) {
                u32 (&to)[4] = own[j * 2 + p];
                to[0] = u[2 * p], to[1] = l[2 * p], to[2] = u[2 * p + 1], to[3] = l[2 * p + 1];
            }
        }
        pin(own);
        open_products();
#pragma unroll
        for (int j = 0; j < AT_A_TIME; j++)
#pragma unroll
            for (int p = 0; p < 2; p++)
                product(acc, own[j * 2 + p], columns + ((q + j) / 2 * (BLOCK_BYTES >> 4) + (q + j) % 2 * 4 + p * 2));
        close_products();
        wait_for_products<1>();
        pin(a[1 - q / AT_A_TIME % 2]);
    }
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
    __shared__ Tokens tokens;
    u8 *const base = memory + (-address_of(memory) & 1023);
    float4 *const left = (float4 *)(base + X_BYTES);  // [WARPGROUPS][SUMS / 4][WARPGROUP]
    const u32 x_at = address_of(base);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / STRIPS, own_strip = warp % STRIPS;
    if (!(flags & 8)) gdc_wait();
    Shares shares(given);
    Share share;
    u32 a[2][2 * AT_A_TIME][4] = {};
    while (shares.next(share)) {
        const int pair = pair_of(given, share, lane), units = (share.count + STRIPS - 1) / STRIPS * UNITS;
        const auto first_unit = [&](int group) { return units * group / WARPGROUPS; };
        int unit = first_unit(group);
        const int last_unit = first_unit(group + 1);
        int four = unit / UNITS, step = (unit - four * UNITS) * DEPTH;  // four: of strips
        bool is_own = step == 0;
        const u8 *codes_at, *scales_at;
        const auto go_to = [&](int four, int step) {
            const int strip = min(four * STRIPS + own_strip, share.count - 1);  // behind the last one it is that again
            const i64 tile = ((i64)share.expert * shares.strips + share.first + strip) * ROW_STEPS + step;
            codes_at = codes + tile * TILE_BYTES + lane * 16;
            scales_at = scales + tile * SCALE_BYTES + lane / 4 * 16 + lane % 4 / 2 * 8;
        };
        Tile ahead[DEPTH];
        if (unit < last_unit) go_to(four, step);
        const auto load = [&](int i) {
            if (unit < last_unit && step + i < ROW_STEPS)
                ahead[i].load(codes_at + i * TILE_BYTES, scales_at + i * SCALE_BYTES);
        };
#pragma unroll
        for (int i = 0; i < FIRST; i++) load(i);
        const int count = __popc(__ballot_sync(0xFFFFFFFFu, pair < num_pairs));
        gdc_wait();  // has passed already but for the first time, and where what is above was early
        gdc_launch_dependents();
        __syncthreads();
        bring_x<Quarter, WARPS, AT_ONCE>(given, x_at, warp, count, pair < num_pairs ? pair / pairs_per_x : 0, 2 * x_stride,
                                         1.f, [] {});
#pragma unroll
        for (int i = FIRST; i < DEPTH; i++) load(i);
        if (warp == 0 && lane < TOKENS) tokens.set(given, lane, pair, share.expert);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads it
        __syncthreads();

        float acc[SUMS];
        const auto clear = [&] {
#pragma unroll
            for (int i = 0; i < SUMS; i++) acc[i] = 0.f;
            pin(acc);
        };
        const auto finish = [&] {
            if (four * STRIPS + own_strip < share.count) write(given, share, tokens, acc, four * STRIPS + own_strip, count);
        };
        const auto leave = [&] {
            float4 *to = left + group * (SUMS / 4) * WARPGROUP + threadIdx.x % WARPGROUP;
#pragma unroll
            for (int i = 0; i < SUMS / 4; i++)
                to[i * WARPGROUP] = make_float4(acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3]);
        };
        clear();
        pin(a);
#pragma unroll 1
        for (; unit < last_unit; unit++) {
            const bool is_last = step + DEPTH >= ROW_STEPS, is_more = unit + 1 < last_unit;
            const int next = is_last ? 0 : step + DEPTH;
            if (is_more) go_to(four + is_last, next);
            const u64 columns_at = operand(uniform(x_at + step * 2 * BLOCK_BYTES));
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (ROW_STEPS % DEPTH == 0 || step + i < ROW_STEPS)
                    add(acc, a, ahead[i], columns_at + i * 2 * (BLOCK_BYTES >> 4));
                if (is_more && (ROW_STEPS % DEPTH == 0 || next + i < ROW_STEPS))
                    ahead[i].load(codes_at + i * TILE_BYTES, scales_at + i * SCALE_BYTES);
            }
            wait_for_products<0>();
            pin(a);
            pin(acc);
            step = next;
            if (is_last) {
                if (is_own)
                    finish();
                else
                    leave();
                is_own = true;
                clear();
                four++;
            }
        }
        if (step > 0 && !is_own) leave();
        __syncthreads();
        if (step > 0 && is_own) {  // the strips' other parts, in the order of steps
            for (int other = group + 1; other < WARPGROUPS && first_unit(other) < (four + 1) * UNITS; other++)
#pragma unroll
                for (int i = 0; i < SUMS / 4; i++) {
                    const float4 v = left[(other * (SUMS / 4) + i) * WARPGROUP + threadIdx.x % WARPGROUP];
                    acc[i * 4] += v.x, acc[i * 4 + 1] += v.y, acc[i * 4 + 2] += v.z, acc[i * 4 + 3] += v.w;
                }
            finish();
        }
    }
    gdc_wait();
}
