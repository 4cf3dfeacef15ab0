// Products of a token or two with a weight, and the norm before them, in one launch. For sm_90 and later.
//
// Every block norms the rows itself, as rms_norm.cu does and with the same bits, and keeps them in shared memory as
// float32, of codes as of bfloat16. All blocks find room at once, BLOCKS on a multiprocessor at most; a warp takes ROWS
// rows of the weight at a time and goes on to those a grid's rows further on. What it multiplies has been read into
// registers, the first of it before the wait for the kernel before; as soon as a piece of these rows is in use, that of
// the next ones is asked for.
//
// A lane takes N columns of each 32 N, its 16 bytes of a piece. Their x lies in shared memory by fours, those of a
// piece's lanes side by side.
//
// Behind norm.cuh. Defined from outside: COLUMNS (a multiple of N), E4M3 (0: weights and normed rows are bfloat16),
// TOKENS, RESIDUAL (0 or 1), ROWS, WARPS, BLOCKS.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int N = E4M3 ? 16 : 8, PIECES = (COLUMNS + 32 * N - 1) / (32 * N), FOURS = N / 4;
using Norm = rms::BlockRows<TOKENS, COLUMNS, WARPS, RESIDUAL>;

struct alignas(16) f32x4 { float v[4]; };
struct alignas(16) u32x4 { u32 v[4]; };

__device__ __forceinline__ u32x4 load_weight(const u8 *p) {
    u32x4 r;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p));
    return r;
}

// Four codes.
__device__ __forceinline__ f32x4 from_e4m3(u32 codes) {
    f32x4 r;
    asm("{.reg .b16 low, high, a, b, c, d;\n"
        ".reg .b32 first, second;\n"
        "mov.b32 {low, high}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 first, low;\n"
        "cvt.rn.f16x2.e4m3x2 second, high;\n"
        "mov.b32 {a, b}, first;\n"
        "mov.b32 {c, d}, second;\n"
        "cvt.f32.f16 %0, a;\n"
        "cvt.f32.f16 %1, b;\n"
        "cvt.f32.f16 %2, c;\n"
        "cvt.f32.f16 %3, d;}"
        : "=f"(r.v[0]), "=f"(r.v[1]), "=f"(r.v[2]), "=f"(r.v[3]) : "r"(codes));
    return r;
}

// Four bfloat16.
__device__ __forceinline__ f32x4 from_bf16(u32 first, u32 second) {
    return {__uint_as_float(first << 16), __uint_as_float(first & 0xFFFF0000u), __uint_as_float(second << 16),
            __uint_as_float(second & 0xFFFF0000u)};
}

// The i-th four of a lane's 16 bytes.
__device__ __forceinline__ f32x4 four_of(const u32x4 &piece, int i) {
    return E4M3 ? from_e4m3(piece.v[i]) : from_bf16(piece.v[2 * i % 4], piece.v[(2 * i + 1) % 4]);
}

// x, residual: (TOKENS, COLUMNS), a stride's numbers apart. sum: (TOKENS, COLUMNS), x + residual, with RESIDUAL.
// in_scale: of the codes. weight: (num_rows, COLUMNS). y: (TOKENS, num_rows) bfloat16, alpha times the product.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) norm_linear_kernel(
    const u16 *x, i64 x_stride, const u16 *residual, i64 residual_stride, const u16 *norm_weight, u16 *sum, float eps,
    float in_scale, const u8 *weight, float alpha, u16 *y, int num_rows) {
    __shared__ Norm::Shared shared;
    __shared__ f32x4 xs[TOKENS][PIECES][FOURS][32];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int step = (int)gridDim.x * WARPS * ROWS;
    int row = ((int)blockIdx.x * WARPS + warp) * ROWS;
    u32x4 ahead[ROWS][PIECES];
    const auto load = [&](int row, int piece) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            ahead[r][piece] = {};
            if (row < num_rows && (COLUMNS % (32 * N) == 0 || (piece * 32 + lane) * N < COLUMNS))
                ahead[r][piece] =
                    load_weight(weight + ((i64)min(row + r, num_rows - 1) * COLUMNS * 16 / N + (piece * 32 + lane) * 16));
        }
    };
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) load(row, piece);

    Norm norm(warp, lane);
    rms::Eight norm_weights[Norm::OWN];
#pragma unroll
    for (int i = 0; i < Norm::OWN; i++) {
        norm.place(i);
        if (!norm.has[i]) continue;
        norm_weights[i] = rms::load(norm_weight + norm.starts[i]);
        norm.prefetch(i, x, x_stride, residual, residual_stride);
    }
    const float inverse = __fdiv_rn(1.f, in_scale);
    if (COLUMNS % (32 * N) != 0 && warp == 0 && (PIECES * 32 - 32 + lane) * N >= COLUMNS) {  // lanes without columns
#pragma unroll
        for (int token = 0; token < TOKENS; token++)
#pragma unroll
            for (int i = 0; i < FOURS; i++) xs[token][PIECES - 1][i][lane] = {};
    }
    gdc_wait();
    gdc_launch_dependents();
    norm.read(x, x_stride, residual, residual_stride, shared);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Norm::OWN; i++) {
        if (!norm.has[i]) continue;
        const int row = norm.rows[i], start = norm.starts[i];
        const rms::Eight result = norm.normed(i, norm_weights[i], eps, shared);
        f32x4 *to = &xs[row][start / (32 * N)][start % N / 4][start % (32 * N) / N];
#if E4M3
        const auto codes = [&](int i) { return rms::to_e4m3(result.v[i], in_scale, inverse); };
        to[0] = from_e4m3(codes(0) | codes(1) << 16);
        to[32] = from_e4m3(codes(2) | codes(3) << 16);
#else
        to[0] = from_bf16(result.v[0], result.v[1]);
        to[32] = from_bf16(result.v[2], result.v[3]);
#endif
        if (RESIDUAL && blockIdx.x == 0) *(rms::Eight *)(sum + (i64)row * COLUMNS + start) = norm.sums[i];
    }
    __syncthreads();

#pragma unroll 1
    for (; row < num_rows; row += step) {
        float products[ROWS][TOKENS][2] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            u32x4 own[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) own[r] = ahead[r][piece];
            load(row + step, piece);
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                f32x4 w[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) w[r] = four_of(own[r], i);
#pragma unroll
                for (int token = 0; token < TOKENS; token++) {
                    const f32x4 v = xs[token][piece][i][lane];
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            products[r][token][j % 2] = __fmaf_rn(w[r].v[j], v.v[j], products[r][token][j % 2]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int token = 0; token < TOKENS; token++) {
                float total = __fadd_rn(products[r][token][0], products[r][token][1]);
#pragma unroll
                for (int offset = 16; offset; offset /= 2)
                    total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFFu, total, offset));
                if (lane == 0 && row + r < num_rows)
                    y[(i64)token * num_rows + row + r] = (u16)rms::to_bf16(__fmul_rn(total, alpha), 0.f);
            }
    }
}
