// Products of a few tokens with weights that go from memory straight into the fragments of mma.m16n8k16.
//
// A weight is the tiles of tiles.py: a step of a warp is one of them, 16 rows of 64 bytes, which are 32 columns of
// bfloat16, 64 of e4m3 or 128 of NVFP4. Lane (g = lane / 4, t = lane % 4) reads 16 bytes of row g and of row g + 8,
// those from 16 t on; its columns are those that its bytes hold. A product sums over its k in any order, as long as both
// operands agree on it: so eight of them, in the order in which they decode, are the lane's part of two products'
// weights, and x lies in shared memory in that order, 16 bytes for each such eight.
//
// e4m3 is multiplied as float16, which holds it exactly: Hopper has no product of e4m3 for a single warp (the compiler
// makes one of float16 out of it), and sums are those of float16 products, better than its e4m3 products for four warps.
//
// Behind nvfp4.cuh. Defined from outside: SCHEME (0 bfloat16, 1 e4m3, 2 NVFP4), NT (tiles of 8 tokens), WR and WK (warps
// along rows, and along columns: their sums are added in order), DEPTH (steps that a warp has under way; even but with STAYS),
// ROWS_KERNEL (a name, by which a trace tells what it is for), and MODE, or STAYS, WHOLE, X_IN_PLACE, FIRST and CHUNK, or
// TOP_K, NUM_SHARED and KS, of the three kernels below.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifndef ROWS_KERNEL
#define ROWS_KERNEL rows_kernel
#endif

#define BF16 0
#define FP8 1
#define NVFP4 2

#ifndef STAYS
static_assert(DEPTH % 2 == 0, "steps are loaded two at a time");
#endif

// Eights of columns that a lane has of a step, and columns of a step.
constexpr int EIGHTS = SCHEME == NVFP4 ? 4 : SCHEME == FP8 ? 2 : 1, STEP_COLUMNS = 32 * EIGHTS;

struct alignas(8) u32x2 { u32 x, y; };
struct alignas(16) u32x4 { u32 x, y, z, w; };

__device__ __forceinline__ u32x4 load_codes(const u8 *p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ void load_scales(const u32 *p, u32 &upper, u32 &lower) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(upper), "=r"(lower) : "l"(p));
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if SCHEME == FP8
#define TYPES "f32.f16.f16.f32"
#else
#define TYPES "f32.bf16.bf16.f32"
#endif
    asm("mma.sync.aligned.m16n8k16.row.col." TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#if SCHEME == FP8
// Four e4m3 codes as two pairs of float16.
__device__ __forceinline__ void to_f16(u32 codes, u32 &first, u32 &second) {
    asm("{.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;}" : "=r"(first), "=r"(second) : "r"(codes));
}

// Eight codes as four pairs.
__device__ __forceinline__ void decode(u32 w, u32 v, u32 (&a)[4]) {
    to_f16(w, a[0], a[1]);
    to_f16(v, a[2], a[3]);
}

// x / scale, saturating, as e4m3 in float16; x: two bfloat16. inverse: 1 / scale, to the nearest. With the remainder
// the quotient is to the nearest, too; what is far beyond the largest code needs none, and could overflow.
__device__ __forceinline__ u32 quantise2(u32 x, float scale, float inverse) {
    const float values[2] = {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)};
    float q[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        q[i] = values[i] * inverse;
        if (fabsf(q[i]) < 1024.f) q[i] = fmaf(fmaf(-q[i], scale, values[i]), inverse, q[i]);
    }
    u32 result;
    asm("{.reg .b16 codes;\n"
        "cvt.rn.satfinite.e4m3x2.f32 codes, %2, %1;\n"
        "cvt.rn.f16x2.e4m3x2 %0, codes;}" : "=r"(result) : "f"(q[0]), "f"(q[1]));
    return result;
}
#endif

// What is the same in all lanes, which lets it stay in a uniform register.
__device__ __forceinline__ int uniform(int v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

// Elements of a row of x in shared memory: 64 bytes more than a multiple of 128, so that tokens lie in different banks.
__device__ __forceinline__ int padded_row(int steps) { return steps * STEP_COLUMNS | 32; }

// Rows of a weight in memory.
__device__ __forceinline__ i64 whole_rows(int num_rows) { return (num_rows + 15) / 16 * 16; }

// The first of `steps` steps that is part `part` of `parts`: even, so that two steps are 128 bytes of a row.
__device__ __forceinline__ int split_at(int steps, int part, int parts) {
    return part == parts ? steps : steps * part / parts / 2 * 2;
}

// Where column c of x lies in a row of shared memory.
__device__ __forceinline__ int place_of(int c) {
    if (SCHEME == BF16) return c;
    if (SCHEME == FP8) return c / 64 * 64 + (c % 16 / 8 * 4 + c % 64 / 16) * 8 + c % 8;
    const int t = c / 64 % 2 * 2 + c % 8 / 4, q = c % 4, j = c / 8 % 8, e = j % 4 * 2 + j / 4;
    return c / 128 * 128 + (q * 4 + t) * 8 + e;
}

__device__ __forceinline__ float to_float(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ u16 to_bf16(float v) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

// Saturating; NaN stays.
__device__ __forceinline__ u8 to_e4m3(float v) {
#if __CUDA_ARCH__ >= 890
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.f), "f"(v));
    return (u8)r;
#else
    const u32 sign = __float_as_uint(v) >> 24 & 0x80;
    const float a = fabsf(v);
    if (a != a) return 0x7F;
    if (a >= 448.f) return sign | 0x7E;
    // Multiples of 2^-9 below 2^-6, and from there three bits after the leading one; to even, as __float2int_rn does.
    const int exponent = max((int)(__float_as_uint(a) >> 23) - 127, -6);
    const float step = __uint_as_float((u32)(exponent - 3 + 127) << 23);
    const u32 code = (u32)__float2int_rn(a / step);
    return sign | (u32)((exponent + 6) * 8 + code);
#endif
}

__device__ __forceinline__ float rounded(float v) { return to_float(to_bf16(v)); }

// A sum in bfloat16's steps, and its squared ReLU, rounded again. NaN stays.
__device__ __forceinline__ float finished(float sum, bool relu_squared) {
    sum = rounded(sum);
    return !relu_squared ? sum : sum > 0.f ? rounded(sum * sum) : sum < 0.f ? 0.f : sum * sum;
}

// A lane's two rows, g and g + 8, of a step: codes and scales.
struct Step {
    u32x4 upper, lower;
#if SCHEME == NVFP4
    u32 upper_scale, lower_scale;
#endif

    __device__ __forceinline__ void load(const u8 *codes, const u32 *scales) {
        upper = load_codes(codes);
        lower = load_codes(codes + 512);
#if SCHEME == NVFP4
        load_scales(scales, upper_scale, lower_scale);
#endif
    }
};

// Where a lane's first bytes and scales lie in a tile of the weight.
__device__ __forceinline__ u32 lane_codes() { return threadIdx.x % 32 * 16; }
__device__ __forceinline__ u32 lane_scales() { return threadIdx.x % 32 / 4 * 4 + threadIdx.x % 4 / 2 * 2; }

// 16 rows of weights times N tiles of 8 tokens: a warp's sums, of which there are two, so that a product need not wait
// for the one before.
template <int N>
struct Sums {
    float acc[N][2][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][0][i] = acc[n][1][i] = 0.f;
    }

    // x: of each tile of tokens, the lane's place in its token's row, at this step.
    __device__ __forceinline__ void add(const Step &step, const u16 *const (&x)[N], int at, int tiles_used) {
        const u32 upper_word[4] = {step.upper.x, step.upper.y, step.upper.z, step.upper.w};
        const u32 lower_word[4] = {step.lower.x, step.lower.y, step.lower.z, step.lower.w};
#if SCHEME == NVFP4
        u32 u0, u1, l0, l1;
        spread(step.upper_scale, u0, u1);
        spread(step.lower_scale, l0, l1);
#endif
#pragma unroll
        for (int q = 0; q < EIGHTS; q++) {
            u32 a[4], b[4];
#if SCHEME == NVFP4
            decode(upper_word[q], u0, u1, a);
            decode(lower_word[q], l0, l1, b);
#elif SCHEME == FP8
            decode(upper_word[2 * q], upper_word[2 * q + 1], a);
            decode(lower_word[2 * q], lower_word[2 * q + 1], b);
#else
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = upper_word[j], b[j] = lower_word[j];
#endif
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (N == 1 || n < tiles_used) {
                    const u32x4 v = *(const u32x4 *)(x[n] + at + q * 32);
                    mma(acc[n][0], a[0], b[0], a[1], b[1], v.x, v.y);
                    mma(acc[n][1], a[2], b[2], a[3], b[3], v.z, v.w);
                }
            }
        }
    }

    __device__ __forceinline__ float sum(int n, int i) const { return acc[n][0][i] + acc[n][1][i]; }
};

// One warp: 16 rows of weights, over the steps [first, last).
template <int N>
struct Products : Sums<N> {
    const u8 *codes;  // of the weight, the same for all lanes; what follows counts bytes, and words, from there
    const u32 *scales;
    u32 codes_at, scales_at;
    int most;  // the last step at which the lane's bytes lie within the row; the first for a lane that has none
    Step ahead[DEPTH];

    // Rows past the end repeat the last ones.
    __device__ __forceinline__ void start(const u8 *codes_, const u32 *scales_, int row, int num_rows, int columns,
                                          int row_bytes, int first, int last) {
        codes = codes_;
        scales = scales_;
        const u32 tile = min(row / 16, (num_rows - 1) / 16) * (row_bytes / 64);
        codes_at = tile * 1024 + lane_codes();
        scales_at = tile * 32 + lane_scales();
        most = row_bytes / 64 - 1;
        if (SCHEME == NVFP4) most = max(((columns + 63) / 64 * 32 - (int)(threadIdx.x % 4) * 16 + 63) / 64 - 1, 0);
#pragma unroll
        for (int i = 0; i < DEPTH; i += 2)
            if (first + i < last) load(i, first + i);
        this->clear();
    }

    // Two steps follow on each other in memory. Where a lane's bytes lie behind the row's end it reads the step before
    // again: its x is zero there.
    __device__ __forceinline__ void load(int i, int step) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 at = min(step + j, most);
            ahead[i + j].load(codes + (codes_at + at * 1024), scales + (scales_at + at * 32));
        }
    }

    __device__ __forceinline__ void run(int first, int last, const u16 *const (&x)[N], int tiles_used) {
        for (int base = first; base < last; base += DEPTH) {
#pragma unroll
            for (int i = 0; i < DEPTH; i += 2) {
                const int step = base + i;
                if (step < last) {
                    this->add(ahead[i], x, step * STEP_COLUMNS, tiles_used);
                    if (step + 1 < last) this->add(ahead[i + 1], x, (step + 1) * STEP_COLUMNS, tiles_used);
                    if (step + DEPTH < last) load(i, step + DEPTH);
                }
            }
        }
    }
};

// Eight columns of x, from c on, to where the products read them in shared memory.
__device__ __forceinline__ void spread_columns(u16 *to, u32x4 v, int c) {
    u16 *base = to + place_of(c);
    if (SCHEME != NVFP4) {
        *(u32x4 *)base = v;
        return;
    }
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    // The eight lie in eight places, in the same order from c on as from the first column of a group.
#pragma unroll
    for (int i = 0; i < 8; i++) base[place_of(i)] = (u16)(words[i / 2] >> (i % 2 * 16));
}

#ifdef STAYS
// Whether rows of x lie as products read them: for bfloat16 weights that is the order of their columns.
constexpr bool AS_IT_LIES = SCHEME == BF16 || X_IN_PLACE;

// `count` such rows of x, as in copy_rows; returns before they are there.
template <typename Row>
__device__ __forceinline__ void copy_rows_as_they_lie(u16 *to, int count, int columns, int steps, Row row) {
    const int chunks = steps * STEP_COLUMNS / 8, x_row = padded_row(steps), lane = threadIdx.x % 32;
    for (int n = threadIdx.x / 32; n < count; n += WR) {
        const u8 *from = row(n);
        const u32 at = (u32)__cvta_generic_to_shared(to + n * x_row);
#pragma unroll 1
        for (int chunk = lane; chunk < chunks; chunk += 32) {
            const int bytes = X_IN_PLACE || chunk * 8 < columns ? 16 : 0;  // zeros behind a row's end
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         :: "r"(at + chunk * 16), "l"(from + 16 * chunk), "r"(bytes) : "memory");
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}
#endif

// Eights of x that a thread has under way. More would spill on sm_100, for no other reason than the compiler's.
#if defined(STAYS) && __CUDA_ARCH__ == 1000
constexpr int AT_ONCE = SCHEME == NVFP4 ? 1 : 2;
#else
constexpr int AT_ONCE = 4;
#endif

// `count` rows of x, eight columns at a time, by all threads together; zeros behind a row's end. row(n): where the
// n-th begins; a warp's lanes call it together, also for rows past the last. x is bfloat16, which for e4m3 weights is
// quantised with `scale`. HOW: CODES, it is e4m3; IN_PLACE, for NVFP4, it lies as the products read it, in whole steps.
enum { AS_IT_IS, CODES, IN_PLACE };

template <int HOW, typename Row>
__device__ __forceinline__ void copy_rows(u16 *to, int count, int columns, int steps, float scale, Row row) {
    const int chunks = steps * STEP_COLUMNS / 8, x_row = padded_row(steps), threads = blockDim.x;
#if SCHEME == FP8
    const float inverse = __frcp_rn(scale);
#endif
    int n = 0, chunk = threadIdx.x;
    for (int done = 0; done < count * chunks; done += AT_ONCE * threads) {
        u32x4 v[AT_ONCE];
        int rows[AT_ONCE], columns_of[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            while (chunk >= chunks) {
                chunk -= chunks;
                n++;
            }
            rows[i] = n;
            columns_of[i] = chunk * 8;
            chunk += threads;
            v[i] = {0, 0, 0, 0};
            const u8 *from = row(rows[i]);
            // In place a piece has columns of one half of a step, 64 of them eight apart.
            const int first = HOW == IN_PLACE ? columns_of[i] / 128 * 128 + columns_of[i] / 16 % 2 * 64 : columns_of[i];
            if (rows[i] < count && first < columns) {
                if (HOW == CODES) {
                    const u32x2 codes = *(const u32x2 *)(from + columns_of[i]);
                    v[i].x = codes.x, v[i].y = codes.y;
                } else {
                    v[i] = *(const u32x4 *)(from + 2 * columns_of[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (rows[i] >= count) continue;
#if SCHEME == FP8
            if (HOW == CODES) {
                u32 a[4];
                decode(v[i].x, v[i].y, a);
                v[i] = {a[0], a[1], a[2], a[3]};
            } else {
                v[i] = {quantise2(v[i].x, scale, inverse), quantise2(v[i].y, scale, inverse),
                        quantise2(v[i].z, scale, inverse), quantise2(v[i].w, scale, inverse)};
            }
#endif
            if (HOW == IN_PLACE)
                *(u32x4 *)(to + rows[i] * x_row + columns_of[i]) = v[i];
            else
                spread_columns(to + rows[i] * x_row, v[i], columns_of[i]);
        }
    }
}

#ifdef STAYS
// All pairs, sorted by their experts, times the weights of these, by blocks that stay. A product is a tile of up to 8 NT
// pairs times 16 rows of their expert's weights; they lie one after the other, a tile's rows side by side. A block takes
// an even share of the first FIRST percent of them, mostly of one tile or two, whose rows of x it reads once, and then
// CHUNK (0: there are no more) at a time of the others, from a counter: multiprocessors differ in what memory gives them.
// Its warps share a tile's products by their steps, so that they end together: what a warp has of a product that the one
// before it has begun it leaves to that one. So a warp's steps follow on each other in memory, from the first to the last.
//
// Tile i: sorted_pairs[8 NT i ..], those below num_pairs, which come first, and expert experts[i]; there are *num_tiles.
// Row p / pairs_per_x of x belongs to pair p. The last num_shared of num_experts are pieces of the shared expert, which each
// token takes after top_k others. WHOLE: a row's steps are a multiple of DEPTH. X_IN_PLACE, for NVFP4 weights: rows of x
// have whole steps of 128 columns, in the order in which products read them.
// flags: 1 squared ReLU, 2 times pair_weights, but float32 into pieces (tokens, num_shared, rows) for those of the shared
// expert, 4 quantised to e4m3 (out is bytes then), with out_scales[expert]; 8 experts, sorted_pairs and num_tiles were
// written before the kernel before this one, which waited for them.
// x: bfloat16; for e4m3 weights quantised with input_scales[expert], or e4m3 without them. counter, with CHUNK: two zeros,
// which they are again in the end.
extern "C" __global__ void __launch_bounds__(32 * WR, STAYS) ROWS_KERNEL(
    const u8 *x, i64 x_stride, const u8 *codes, const u32 *scales, const float *alpha, const int *sorted_pairs,
    const int *experts, const int *num_tiles, const float *pair_weights, void *out, float *pieces, int num_pairs,
    int pairs_per_x, int top_k, int num_shared, int num_experts, int num_rows, int columns, int row_bytes, int flags,
    const float *input_scales, const float *out_scales, int *counter) {
    extern __shared__ __align__(16) u8 shared[];
    __shared__ int taken[2];  // with a count of the counter: the first product and their end
    __shared__ int pairs[8 * NT];
    __shared__ float factors[8 * NT];  // of a pair's sums
    __shared__ float left[WR][NT][4][32];  // what a warp has of a product that another has begun
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int steps = row_bytes / 64, units = (steps + DEPTH - 1) / DEPTH;  // of a row, DEPTH steps each
    const int x_row = padded_row(steps), row_tiles = (num_rows + 15) / 16;
    const int pairs_per_token = top_k + num_shared, routed = num_experts - num_shared;
    const bool is_codes = SCHEME == FP8 && input_scales == nullptr, is_weighted = flags & 2;
    // Lanes without bytes of a row's last step do not read it: x is zero there, and codes of the same rows remain.
    const bool skips = SCHEME == NVFP4 && units > 1 && (steps - 1) * 64 + t * 16 >= (columns + 63) / 64 * 32;
    u16 *xs = (u16 *)shared;
    if (!(flags & 8)) gdc_wait();
    const auto count_products = [&] { return uniform(load_early(num_tiles)) * row_tiles; };
    const auto shared_evenly = [](int products) { return CHUNK ? (int)(((i64)products * FIRST + 99) / 100) : products; };
    const int even = shared_evenly(count_products());
    int at = (i64)even * blockIdx.x / gridDim.x, end = (i64)even * (blockIdx.x + 1) / gridDim.x;
    const auto take_more = [&] {
        if (CHUNK == 0) return false;
        __syncthreads();
        if (warp == 0) {  // which counts them again, since registers are few
            const int products = count_products();
            if (lane == 0) {
                taken[0] = shared_evenly(products) + atomicAdd(counter, 1) * CHUNK;
                taken[1] = min(taken[0] + CHUNK, products);
            }
        }
        __syncthreads();
        at = taken[0];
        end = taken[1];
        return at < end;
    };
    while (at < end || take_more()) {
        const int tile = at / row_tiles, first_row = at - tile * row_tiles, rows = min(row_tiles - first_row, end - at);
        const int expert = uniform(load_early(experts + tile));
        // Lane n: the pair of the tile's place n; num_pairs in one that is empty.
        const int own = lane < 8 * NT ? load_early(sorted_pairs + tile * 8 * NT + lane) : num_pairs;
        const auto first_unit = [&](int warp) { return rows * units * warp / WR; };
        int unit = first_unit(warp);
        const int last_unit = first_unit(warp + 1);
        int row = unit / units, step = (unit - row * units) * DEPTH;
        bool is_own = step == 0;
        const i64 bank = expert * whole_rows(num_rows) * row_bytes;
        const i64 start = (i64)(first_row + row) * steps + step;  // in tiles of the weight
        const u8 *codes_at = codes + bank + start * 1024 + lane_codes();
        const u32 *scales_at = scales + bank / 32 + start * 32 + lane_scales();
        Step ahead[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            ahead[i] = {};
            if (unit < last_unit && step + i < steps && !(skips && step + i == steps - 1))
                ahead[i].load(codes_at + i * 1024, scales_at + i * 32);
        }
        const int count = min(__popc(__ballot_sync(0xFFFFFFFFu, own < num_pairs)), 8 * NT);
        const int own_row = own / pairs_per_x;
        const bool is_piece = is_weighted && expert >= routed;
        gdc_wait();  // has passed already but for the first time, and where what is above was early
        gdc_launch_dependents();
        __syncthreads();
        const i64 x_bytes = is_codes ? x_stride : 2 * x_stride;
        const auto x_of = [&](int n) { return x + __shfl_sync(0xFFFFFFFFu, own_row, n) * x_bytes; };
        if (AS_IT_LIES)
            copy_rows_as_they_lie(xs, count, columns, steps, x_of);
        else if (is_codes)
            copy_rows<CODES>(xs, count, columns, steps, 1.f, x_of);
        else
            copy_rows<AS_IT_IS>(xs, count, columns, steps, SCHEME == FP8 ? input_scales[expert] : 1.f, x_of);
        if (warp == 0 && lane < 8 * NT) {
            const float scale = alpha != nullptr ? alpha[expert] : 1.f;
            const bool has_weight = is_weighted && !is_piece && own < num_pairs;
            pairs[lane] = own;
            factors[lane] = has_weight ? pair_weights[own - own / pairs_per_token * num_shared] * scale : scale;
        }
        if (AS_IT_LIES) asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        const u16 *place[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) place[n] = xs + (n * 8 + g < count ? n * 8 + g : 0) * x_row + t * 8;
        Sums<NT> sums;
        sums.clear();

        const auto write = [&] {
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (n * 8 >= count) break;
                const int first = n * 8 + t * 2;  // the lane's two tokens, of each of its two rows
                if (is_piece) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int pair = pairs[first + i % 2], r = (first_row + row) * 16 + g + i / 2 * 8;
                        const i64 piece = (i64)(pair / pairs_per_token) * num_shared + expert - routed;
                        if (pair < num_pairs && r < num_rows)
                            pieces[piece * num_rows + r] = sums.sum(n, i) * factors[first + i % 2];
                    }
                    continue;
                }
                // The lane of the row beside, one further or one before, has the same tokens. Each keeps one, of both rows.
                const int is_odd = g % 2, pair = pairs[first + is_odd];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 pack = 0;
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float sum = sums.sum(n, half * 2 + i) * factors[first + i];
                        pack |= (u32)to_bf16(finished(sum, flags & 1)) << (16 * i);
                    }
                    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, pack, 4);
                    const u32 result = __byte_perm(pack, other, is_odd ? 0x3276 : 0x5410);
                    const int r = (first_row + row) * 16 + half * 8 + g / 2 * 2;
                    if (pair >= num_pairs || r >= num_rows) continue;
                    const i64 to = (i64)pair * num_rows + r;
                    if (flags & 4) {
                        const float code_scale = out_scales[expert];
                        u8 *bytes = (u8 *)out + to;
                        bytes[0] = to_e4m3(__fdiv_rn(to_float((u16)result), code_scale));
                        if (r + 1 < num_rows) bytes[1] = to_e4m3(__fdiv_rn(to_float(result >> 16), code_scale));
                    } else if (num_rows % 2 == 0) {
                        *(u32 *)((u16 *)out + to) = result;
                    } else {
                        ((u16 *)out)[to] = (u16)result;
                        if (r + 1 < num_rows) ((u16 *)out)[to + 1] = result >> 16;
                    }
                }
            }
        };
        const auto leave = [&] {
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) left[warp][n][i][lane] = sums.sum(n, i);
        };

        const int tiles_used = (count + 7) / 8;
        for (; unit < last_unit; unit++) {
            const int here = WHOLE ? DEPTH : min(DEPTH, steps - step);
            const bool is_last = step + here == steps, is_more = unit + 1 < last_unit;
            const int next = is_last ? 0 : step + DEPTH;
            codes_at += here * 1024;
            scales_at += here * 32;
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (WHOLE || i < here) sums.add(ahead[i], place, (step + i) * STEP_COLUMNS, tiles_used);
                const bool is_there = is_more && (WHOLE || next + i < steps);
                const bool may_skip = !WHOLE || i == DEPTH - 1;
                if (is_there && !(may_skip && skips && next + i == steps - 1))
                    ahead[i].load(codes_at + i * 1024, scales_at + i * 32);
            }
            step = next;
            if (is_last) {
                if (is_own)
                    write();
                else
                    leave();
                is_own = true;
                sums.clear();
                row++;
            }
        }
        if (step > 0 && !is_own) leave();
        __syncthreads();
        if (step > 0 && is_own) {  // the product's other parts, in the order of steps
            for (int other = warp + 1; other < WR && first_unit(other) < (row + 1) * units; other++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sums.acc[n][0][i] += left[other][n][i][lane];
            write();
        }
        at += rows;
    }
    gdc_wait();
    if (CHUNK && threadIdx.x == 0 && atomicAdd(counter + 1, 1) == gridDim.x - 1) counter[0] = counter[1] = 0;
}

#elif defined(MODE)
constexpr int LINEAR = 0, ALONE = 1;

// A tile of tokens, or one pair, times 16 WR rows of one weight. alpha: by expert; null: one_alpha.
//
// LINEAR, tile y: tokens 8 NT y .. of one weight. ALONE: pair y, of its own expert; experts are the routed ids. Pairs and
// pieces are as above.
// flags: 1 squared ReLU, 4 quantised to e4m3 (out is bytes then), with out_scales[expert], or out_scale; 16, for NVFP4
// weights: rows of out have whole steps of 128 columns, in the order in which products read them.
// x: bfloat16; for e4m3 weights quantised with input_scales[expert], or e4m3 without them.
extern "C" __global__ void __launch_bounds__(32 * WR * WK) ROWS_KERNEL(
    const u8 *x, i64 x_stride, const u8 *codes, const u32 *scales, const float *alpha, const int *experts, void *out,
    float one_alpha, float out_scale, int num_tokens, int pairs_per_x, int top_k, int num_shared, int num_experts,
    int num_rows, int columns, int row_bytes, int flags, const float *input_scales, const float *out_scales) {
    extern __shared__ __align__(16) u8 shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, wr = warp / WK, wk = warp % WK;
    const int g = lane / 4, t = lane % 4;
    const int steps = (row_bytes + 63) / 64, x_row = padded_row(steps), row = (blockIdx.x * WR + wr) * 16;
    const int first = split_at(steps, wk, WK), last = row < num_rows ? split_at(steps, wk + 1, WK) : first;
    Products<NT> products;
    const int tile = blockIdx.y, pairs_per_token = top_k + num_shared, k = tile % pairs_per_token;
    // Which expert it is an earlier kernel says, but of the shared one's pieces.
    const bool is_known = MODE == LINEAR || k >= top_k;
    int expert = MODE == LINEAR ? 0 : num_experts - num_shared + k - top_k;
    const auto start = [&] {
        const i64 bank = expert * whole_rows(num_rows);
        products.start(codes + bank * row_bytes, scales + bank * (row_bytes / 32), row, num_rows, columns, row_bytes,
                       first, last);
    };
    if (is_known) start();
    gdc_wait();
    if (!is_known) {
        expert = load_early(experts + tile / pairs_per_token * top_k + k);
        start();
    }
    gdc_launch_dependents();
    const int first_token = MODE == LINEAR ? tile * 8 * NT : tile;
    const int count = MODE == LINEAR ? min(num_tokens - first_token, 8 * NT) : 1;
    u16 *xs = (u16 *)shared;
    const bool is_codes = SCHEME == FP8 && input_scales == nullptr;
    const i64 x_bytes = is_codes ? x_stride : 2 * x_stride;
    const auto x_of = [&](int n) { return x + (first_token + n) / pairs_per_x * x_bytes; };
    if (is_codes)
        copy_rows<CODES>(xs, count, columns, steps, 1.f, x_of);
    else
        copy_rows<AS_IT_IS>(xs, count, columns, steps, SCHEME == FP8 ? input_scales[expert] : 1.f, x_of);
    __syncthreads();
    const u16 *place[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) place[n] = xs + (n * 8 + g < count ? n * 8 + g : 0) * x_row + t * 8;
    products.run(first, last, place, (count + 7) / 8);
    __syncthreads();
    float *sums = (float *)shared;  // [WK][8 NT][16 WR]
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[(wk * 8 * NT + n * 8 + t * 2 + i % 2) * 16 * WR + wr * 16 + g + i / 2 * 8] = products.sum(n, i);
    __syncthreads();
    const float scale = alpha != nullptr ? alpha[expert] : one_alpha;
    const float code_scale = out_scales != nullptr ? out_scales[expert] : out_scale;
    for (int index = thread; index < count * 8 * WR; index += 32 * WR * WK) {  // two rows a thread
        const int n = index / (8 * WR), r = index % (8 * WR) * 2, row = blockIdx.x * 16 * WR + r;
        if (row >= num_rows) continue;
        float result[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0.f;
#pragma unroll
            for (int k = 0; k < WK; k++) sum += sums[(k * 8 * NT + n) * 16 * WR + r + i];
            result[i] = finished(sum * scale, flags & 1);
        }
        const i64 at = (i64)(first_token + n) * num_rows + row;
        const bool is_last = row + 1 == num_rows;
        if (SCHEME == NVFP4 && MODE == ALONE && flags & 16) {
            u16 *to = (u16 *)out + (i64)tile * ((num_rows + 127) / 128 * 128) + place_of(row);
            to[0] = to_bf16(result[0]);
            to[place_of(1)] = to_bf16(result[1]);
        } else if (flags & 4) {
            u8 *to = (u8 *)out + at;
            to[0] = to_e4m3(__fdiv_rn(result[0], code_scale));
            if (!is_last) to[1] = to_e4m3(__fdiv_rn(result[1], code_scale));
        } else if (num_rows % 2 == 0) {
            *(u32 *)((u16 *)out + at) = to_bf16(result[0]) | (u32)to_bf16(result[1]) << 16;
        } else {
            u16 *to = (u16 *)out + at;
            to[0] = to_bf16(result[0]);
            if (!is_last) to[1] = to_bf16(result[1]);
        }
    }
}
#else
// 16 rows of a token's output: each of its experts' down projections by KS warps, weighted, rounded and added in routing
// order, scaled, and with the shared part added, which is given or is the sum of NUM_SHARED experts more. hidden:
// bfloat16; e4m3 for such weights. ids were written before the kernel before this one, which waited for them.
constexpr int PAIRS = TOP_K + NUM_SHARED;

extern "C" __global__ void __launch_bounds__(32 * PAIRS * KS) down_kernel(
    const u8 *hidden, const u8 *codes, const u32 *scales, const float *alpha, const int *ids,
    const float *pair_weights, const u16 *shared_part, i64 shared_stride, float routed_scale, u16 *out, int num_experts,
    int num_rows, int columns, int row_bytes, int is_in_place) {
    extern __shared__ __align__(16) u8 shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, k = warp / KS, split = warp % KS;
    const int g = lane / 4, t = lane % 4, token = blockIdx.y, routed_experts = num_experts - NUM_SHARED;
    const int steps = (row_bytes + 63) / 64, x_row = padded_row(steps);
    const int first = split_at(steps, split, KS), last = split_at(steps, split + 1, KS);
    const int expert = k < TOP_K ? load_early(ids + token * TOP_K + k) : routed_experts + k - TOP_K;
    const i64 bank = expert * whole_rows(num_rows);
    Products<1> products;
    products.start(codes + bank * row_bytes, scales + bank * (row_bytes / 32), blockIdx.x * 16, num_rows, columns,
                   row_bytes, first, last);
    gdc_wait();
    gdc_launch_dependents();
    u16 *xs = (u16 *)shared;
    const bool in_place = SCHEME == NVFP4 && is_in_place;
    const i64 x_bytes = SCHEME == FP8 ? columns : 2 * (in_place ? steps * 128 : columns);
    const auto row_of = [&](int n) { return hidden + (token * PAIRS + n) * x_bytes; };
    if (in_place)
        copy_rows<IN_PLACE>(xs, PAIRS, columns, steps, 1.f, row_of);
    else
        copy_rows<SCHEME == FP8 ? CODES : AS_IT_IS>(xs, PAIRS, columns, steps, 1.f, row_of);
    __syncthreads();
    const u16 *place[1] = {xs + k * x_row + t * 8};
    products.run(first, last, place, 1);
    __syncthreads();
    float *sums = (float *)shared;  // [PAIRS * KS][16]
    if (t == 0) {
        sums[warp * 16 + g] = products.sum(0, 0);
        sums[warp * 16 + g + 8] = products.sum(0, 2);
    }
    __syncthreads();
    const int row = blockIdx.x * 16 + thread;
    if (thread < 16 && row < num_rows) {
        float routed = 0.f, pieces = 0.f;
        for (int i = 0; i < PAIRS; i++) {
            float sum = 0.f;
            for (int s = 0; s < KS; s++) sum += sums[(i * KS + s) * 16 + thread];
            const int expert = i < TOP_K ? ids[token * TOP_K + i] : routed_experts + i - TOP_K;
            sum *= alpha != nullptr ? alpha[expert] : 1.f;
            if (i < TOP_K)
                routed += rounded(sum * pair_weights[token * TOP_K + i]);
            else
                pieces += sum;
        }
        float result = rounded(rounded(routed) * routed_scale);
        if (NUM_SHARED > 0)
            result = rounded(result + rounded(pieces));
        else if (shared_part != nullptr)
            result = rounded(result + to_float(shared_part[token * shared_stride + row]));
        out[(i64)token * num_rows + row] = to_bf16(result);
    }
}
#endif
