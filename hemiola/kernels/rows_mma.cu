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
// NVFP4: a code's sign and magnitude bits, moved to a bfloat16's sign and to the last bits of its exponent with the first of
// its mantissa, are its value times 2^-126; scales are times 2^119. Their product, e2m1 times e4m3 times 2^-7, is exact
// in bfloat16; what remains belongs to `alpha`.
//
// Defined from outside: SCHEME (0 bfloat16, 1 e4m3, 2 NVFP4), NT (tiles of 8 tokens), WR and WK (warps along rows, and
// along columns: their sums are added in order), DEPTH (steps that a warp has under way, even), ROWS_KERNEL (a name, by
// which a trace tells what it is for), MODE (below), TOP_K, NUM_SHARED and KS (of the down kernel).

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

constexpr int LINEAR = 0, ALONE = 1, GROUPED = 2;
static_assert(DEPTH % 2 == 0, "steps are loaded two at a time");

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

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
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

#if SCHEME == NVFP4
// The scales of the 16 bytes of a lane: those of the first two and of the last two pairs of codes of a word.
__device__ __forceinline__ void spread(u32 scales, u32 &first, u32 &second) {
    first = (scales & 0x0FF00FF0u) | 0x70007000u;
    second = (__byte_perm(scales, 0, 0x2301) & 0x0FF00FF0u) | 0x70007000u;
}

// A word's eight codes as four pairs.
__device__ __forceinline__ void decode(u32 w, u32 first, u32 second, u32 (&a)[4]) {
    const u32 m = 0x81C081C0u;
    a[0] = mul2(w & m, first);
    a[1] = mul2((w << 3) & m, first);
    a[2] = mul2((w << 6) & m, second);
    a[3] = mul2(((w << 1) & 0x80008000u) | ((w >> 4) & 0x00C000C0u) | ((w >> 5) & 0x01000100u), second);
}

#elif SCHEME == FP8
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

// An int that a kernel before the one before this one wrote: from L2, as no kernel has begun anew since.
__device__ __forceinline__ int load_early(const int *p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

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

// Two steps of a lane's two rows, g and g + 8: codes and scales.
struct Pair {
    u32x4 upper[2], lower[2];
#if SCHEME == NVFP4
    u32 upper_scale[2], lower_scale[2];
#endif
};

// One warp: 16 rows of weights times N tiles of 8 tokens, over the steps [first, last).
template <int N>
struct Products {
    const u8 *codes;  // of the weight, the same for all lanes; what follows counts bytes, and words, from there
    const u32 *scales;
    u32 codes_at, scales_at;
    int most;  // the last step at which the lane's bytes lie within the row; the first for a lane that has none
    Pair ahead[DEPTH / 2];
    float acc[N][2][4];  // two sums, so that a product need not wait for the one before

    // Rows past the end repeat the last ones.
    __device__ __forceinline__ void start(const u8 *codes_, const u32 *scales_, int row, int num_rows, int columns,
                                          int row_bytes, int first, int last) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        codes = codes_;
        const u32 tile = min(row / 16, (num_rows - 1) / 16) * (row_bytes / 64);
        codes_at = tile * 1024 + lane * 16;
#if SCHEME == NVFP4
        scales = scales_;
        scales_at = tile * 32 + g * 4 + t / 2 * 2;
        most = max(((columns + 63) / 64 * 32 - (int)t * 16 + 63) / 64 - 1, 0);
#else
        most = row_bytes / 64 - 1;
#endif
#pragma unroll
        for (int i = 0; i < DEPTH / 2; i++)
            if (first + 2 * i < last) load(ahead[i], first + 2 * i);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[n][0][i] = acc[n][1][i] = 0.f;
    }

    // Two steps follow on each other in memory. Where a lane's bytes lie behind the row's end it reads the step before
    // again: its x is zero there.
    __device__ __forceinline__ void load(Pair &pair, int step) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 at = min(step + i, most);
            pair.upper[i] = load_codes(codes + (codes_at + at * 1024));
            pair.lower[i] = load_codes(codes + (codes_at + at * 1024) + 512);
#if SCHEME == NVFP4
            load_scales(scales + (scales_at + at * 32), pair.upper_scale[i], pair.lower_scale[i]);
#endif
        }
    }

    // x: of each tile of tokens, the lane's place in its token's row.
    __device__ __forceinline__ void run(int first, int last, const u16 *const (&x)[N], int tiles_used) {
        for (int base = first; base < last; base += DEPTH) {
#pragma unroll
            for (int i = 0; i < DEPTH / 2; i++) {
                const int step = base + 2 * i;
                if (step < last) {
                    multiply(ahead[i], 0, x, step, tiles_used);
                    if (step + 1 < last) multiply(ahead[i], 1, x, step + 1, tiles_used);
                    if (step + DEPTH < last) load(ahead[i], step + DEPTH);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply(const Pair &pair, int i, const u16 *const (&x)[N], int step,
                                             int tiles_used) {
        const u32 upper_word[4] = {pair.upper[i].x, pair.upper[i].y, pair.upper[i].z, pair.upper[i].w};
        const u32 lower_word[4] = {pair.lower[i].x, pair.lower[i].y, pair.lower[i].z, pair.lower[i].w};
#if SCHEME == NVFP4
        u32 u0, u1, l0, l1;
        spread(pair.upper_scale[i], u0, u1);
        spread(pair.lower_scale[i], l0, l1);
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
                    const u32x4 v = *(const u32x4 *)(x[n] + step * STEP_COLUMNS + q * 32);
                    mma(acc[n][0], a[0], b[0], a[1], b[1], v.x, v.y);
                    mma(acc[n][1], a[2], b[2], a[3], b[3], v.z, v.w);
                }
            }
        }
    }

    __device__ __forceinline__ float sum(int n, int i) const { return acc[n][0][i] + acc[n][1][i]; }
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
    for (int done = 0; done < count * chunks; done += 4 * threads) {
        u32x4 v[4];
        int rows[4], columns_of[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
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
        for (int i = 0; i < 4; i++) {
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

// A tile of up to 8 NT tokens or pairs times 16 WR rows of one weight. alpha: by expert; null: one_alpha.
//
// Tile y. GROUPED: its pairs are sorted_pairs[8 NT y ..], those below num_tokens, which come first, and its expert is
// experts[y]; nothing happens from y = *num_tiles on. ALONE: pair y, of its own expert; experts are the routed ids.
// LINEAR: tokens 8 NT y .. of one weight. Row p / pairs_per_x of x belongs to pair p.
// The last num_shared of num_experts are pieces of the shared expert, which each token takes after top_k others.
// flags: 1 squared ReLU, 2 times pair_weights, but float32 into pieces (tokens, num_shared, rows) for those of the shared
// expert, 4 quantised to e4m3 (out is bytes then), with out_scales[expert], or out_scale; 8 experts, sorted_pairs and
// num_tiles were written before the kernel before this one, which waited for them.
// x: bfloat16; for e4m3 weights quantised with input_scales[expert], or e4m3 without them. For NVFP4 weights, 16: rows of
// out, and 32: of x, have whole steps of 128 columns, in the order in which products read them.
extern "C" __global__ void __launch_bounds__(32 * WR * WK) ROWS_KERNEL(
    const u8 *x, i64 x_stride, const u8 *codes, const u32 *scales, const float *alpha, const int *sorted_pairs,
    const int *experts, const int *num_tiles, const float *pair_weights, void *out, float *pieces, float one_alpha,
    float out_scale, int num_tokens, int pairs_per_x, int top_k, int num_shared, int num_experts, int num_rows,
    int columns, int row_bytes, int flags, const float *input_scales, const float *out_scales) {
    extern __shared__ __align__(16) u8 shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, wr = warp / WK, wk = warp % WK;
    const int g = lane / 4, t = lane % 4;
    const int steps = (row_bytes + 63) / 64, x_row = padded_row(steps), row = (blockIdx.x * WR + wr) * 16;
    const int first = split_at(steps, wk, WK), last = row < num_rows ? split_at(steps, wk + 1, WK) : first;
    Products<NT> products;
    const int tile = blockIdx.y, pairs_per_token = top_k + num_shared, routed = num_experts - num_shared;
    // Lane n: the pair, or token, of the tile's place n; num_tokens in one that is empty.
    int own, expert = 0;
    const auto start = [&] {
        const i64 bank = expert * whole_rows(num_rows);
        products.start(codes + bank * row_bytes, scales + bank * (row_bytes / 32), row, num_rows, columns, row_bytes,
                       first, last);
    };
    if (MODE == LINEAR) {
        start();
        gdc_wait();
        own = min(tile * 8 * NT + lane, num_tokens);
    } else {
        const bool is_early = flags & 8;
        const int k = tile % pairs_per_token;
        const bool is_known = MODE == ALONE && k >= top_k;
        if (is_known) {
            expert = routed + k - top_k;
            start();
        }
        if (!is_early) gdc_wait();
        if (MODE == ALONE) {
            own = lane == 0 ? tile : num_tokens;
            if (!is_known) expert = load_early(experts + tile / pairs_per_token * top_k + k);
        } else {
            if (tile >= load_early(num_tiles)) return;
            expert = load_early(experts + tile);
            own = lane < 8 * NT ? load_early(sorted_pairs + tile * 8 * NT + lane) : num_tokens;
        }
        if (!is_known) start();
        if (is_early) gdc_wait();
    }
    gdc_launch_dependents();
    const int count = min(__popc(__ballot_sync(0xFFFFFFFFu, own < num_tokens)), 8 * NT);
    const int own_row = own / pairs_per_x;
    u16 *xs = (u16 *)shared;
    const bool is_codes = SCHEME == FP8 && input_scales == nullptr;
    const i64 x_bytes = is_codes ? x_stride : 2 * x_stride;
    const auto x_of = [&](int n) { return x + __shfl_sync(0xFFFFFFFFu, own_row, n) * x_bytes; };
    if (is_codes)
        copy_rows<CODES>(xs, count, columns, steps, 1.f, x_of);
    else if (SCHEME == NVFP4 && MODE != LINEAR && flags & 32)
        copy_rows<IN_PLACE>(xs, count, columns, steps, 1.f, x_of);
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
    const bool is_weighted = MODE != LINEAR && flags & 2, is_piece = is_weighted && expert >= routed;
    const float code_scale = out_scales != nullptr ? out_scales[expert] : out_scale;
    for (int base = 0; base < count * 8 * WR; base += 32 * WR * WK) {  // two rows a thread
        const int index = base + thread, n = index / (8 * WR), r = index % (8 * WR) * 2, row = blockIdx.x * 16 * WR + r;
        const int pair = __shfl_sync(0xFFFFFFFFu, own, n);
        if (n >= count || row >= num_rows) continue;
        const int token = pair / pairs_per_token;
        const float weight = is_weighted && !is_piece ? pair_weights[pair - token * num_shared] : 1.f;
        float result[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = 0.f;
#pragma unroll
            for (int k = 0; k < WK; k++) sum += sums[(k * 8 * NT + n) * 16 * WR + r + i];
            sum = sum * scale * weight;
            if (is_piece) {
                result[i] = sum;
                continue;
            }
            sum = rounded(sum);
            if (flags & 1) sum = sum > 0.f ? rounded(sum * sum) : (sum < 0.f ? 0.f : sum * sum);
            result[i] = sum;
        }
        const i64 at = (i64)pair * num_rows + row;
        const bool is_last = row + 1 == num_rows;
        if (is_piece) {
            float *to = pieces + ((i64)token * num_shared + expert - routed) * num_rows + row;
            to[0] = result[0];
            if (!is_last) to[1] = result[1];
        } else if (SCHEME == NVFP4 && MODE != LINEAR && flags & 16) {
            u16 *to = (u16 *)out + (i64)pair * ((num_rows + 127) / 128 * 128) + place_of(row);
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

#ifdef TOP_K
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
