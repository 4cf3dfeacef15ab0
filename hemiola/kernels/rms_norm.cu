// RMSNorm of rows, with the addition before it and the e4m3 quantisation behind it. A block a row, a thread eight columns.
//
// A step has one before every mixer, with little to do: what counts is what lies one after the other between the wait
// for the kernel before and the last store. So all that can be done before that wait is, a thread adds as a tree, and
// there is one barrier, after which every thread adds all warps' sums itself.
//
// Defined from outside: HIDDEN (a multiple of 8, at most 8192), RESIDUAL and QUANTISES (0 or 1; the latter needs sm_89).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

struct alignas(16) u32x4 { u32 v[4]; };
struct alignas(8) u32x2 { u32 v[2]; };

constexpr int THREADS = (HIDDEN / 8 + 31) / 32 * 32, WARPS = THREADS / 32;

// Behind the wait a load has to stay, and to be one of sixteen bytes.
__device__ __forceinline__ u32x4 load(const u16 *p) {
    u32x4 r;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p) : "memory");
    return r;
}

// Before the wait: has an address computed, whose line is in the cache already or comes to it.
__device__ __forceinline__ void prefetch(const u16 *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

__device__ __forceinline__ void widened(const u32x4 &from, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = __uint_as_float(from.v[i] << 16);
        to[2 * i + 1] = __uint_as_float(from.v[i] & 0xFFFF0000u);
    }
}

// bfloat16, by pairs; one rounding.
__device__ __forceinline__ u32 added(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3F803F80u), "r"(b));
    return r;
}

__device__ __forceinline__ u32 to_bf16(float first, float second) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}

// Two bfloat16, divided: saturating; NaN stays.
__device__ __forceinline__ u32 to_e4m3(u32 pair, float scale) {
    u16 r;
    const float first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xFFFF0000u);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(r) : "f"(__fdiv_rn(second, scale)), "f"(__fdiv_rn(first, scale)));
    return r;
}

// x, residual: rows so many numbers apart. sum: x + residual, written with RESIDUAL. y: bfloat16, or e4m3 of y / out_scale.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_kernel(
    const u16 *x, i64 x_stride, const u16 *residual, i64 residual_stride, const u16 *weight, void *y, u16 *sum, float eps,
    float out_scale) {
    __shared__ __align__(16) float sums[(WARPS + 3) / 4 * 4];
    const int thread = threadIdx.x, column = thread * 8;
    const bool is_in = HIDDEN == THREADS * 8 || column < HIDDEN;
    const i64 at = (i64)blockIdx.x * HIDDEN + column;
    const u16 *from = x + blockIdx.x * x_stride + column, *added_from = residual + blockIdx.x * residual_stride + column;
    u32x4 weights = {};
    float w[8], v[8] = {};
    if (is_in) {
        weights = load(weight + column);
        prefetch(from);
        if (RESIDUAL) prefetch(added_from);
    }
    gdc_wait();
    gdc_launch_dependents();
    if (is_in) {
        u32x4 own = load(from);
        if (RESIDUAL) {
            const u32x4 other = load(added_from);
#pragma unroll
            for (int i = 0; i < 4; i++) own.v[i] = added(own.v[i], other.v[i]);
            *(u32x4 *)(sum + at) = own;
        }
        widened(own, v);
    }
    float pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = v[2 * i] * v[2 * i] + v[2 * i + 1] * v[2 * i + 1];
    float total = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
#pragma unroll
    for (int offset = 16; offset; offset /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, offset);
    if (WARPS > 1) {
        if (thread % 32 == 0) sums[thread / 32] = total;
        __syncthreads();
        float parts[4] = {};
#pragma unroll
        for (int i = 0; i < WARPS; i++) parts[i % 4] += sums[i];
        total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
    const float scale = rsqrtf(total * (1.f / HIDDEN) + eps);
    if (!is_in) return;
    widened(weights, w);
    u32x4 result;
#pragma unroll
    for (int i = 0; i < 4; i++)
        result.v[i] = to_bf16(v[2 * i] * scale * w[2 * i], v[2 * i + 1] * scale * w[2 * i + 1]);
#if QUANTISES
    u32x2 codes;
#pragma unroll
    for (int i = 0; i < 2; i++)
        codes.v[i] = to_e4m3(result.v[2 * i], out_scale) | to_e4m3(result.v[2 * i + 1], out_scale) << 16;
    *(u32x2 *)((u8 *)y + at) = codes;
#else
    *(u32x4 *)((u16 *)y + at) = result;
#endif
}
