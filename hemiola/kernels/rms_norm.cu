// RMSNorm of rows, with the addition before it and the e4m3 quantisation behind it. A block a row, a thread eight
// columns.
//
// A step has one before every mixer, with little to do: what counts is what lies one after the other between the wait
// for the kernel before and the last store. So all that can be done before that wait is, a thread adds as a tree, and
// there is one barrier, after which every thread adds all warps' sums itself.
//
// Behind norm.cuh. Defined from outside: HIDDEN (a multiple of 8, at most 8192), RESIDUAL and QUANTISES (0 or 1; the
// latter needs sm_89).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

struct alignas(8) u32x2 { u32 v[2]; };

constexpr int THREADS = (HIDDEN / 8 + 31) / 32 * 32, WARPS = THREADS / 32;

// x, residual: rows so many numbers apart. sum: x + residual, written with RESIDUAL. y: bfloat16, or e4m3 of y / out_scale.
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_kernel(
    const u16 *x, i64 x_stride, const u16 *residual, i64 residual_stride, const u16 *weight, void *y, u16 *sum, float eps,
    float out_scale) {
    __shared__ __align__(16) float sums[(WARPS + 3) / 4 * 4];
    const int thread = threadIdx.x, column = thread * 8;
    const bool is_in = HIDDEN == THREADS * 8 || column < HIDDEN;
    const i64 at = (i64)blockIdx.x * HIDDEN + column;
    const u16 *from = x + blockIdx.x * x_stride + column, *added_from = residual + blockIdx.x * residual_stride + column;
    rms::Eight weights = {};
    float v[8] = {};
    if (is_in) {
        weights = rms::load(weight + column);
        rms::prefetch(from);
        if (RESIDUAL) rms::prefetch(added_from);
    }
    gdc_wait();
    gdc_launch_dependents();
    if (is_in) {
        rms::Eight own = rms::load(from);
        if (RESIDUAL) {
            own = rms::added(own, rms::load(added_from));
            *(rms::Eight *)(sum + at) = own;
        }
        rms::widened(own, v);
    }
    float total = rms::squares(v);
    if (WARPS > 1) {
        if (thread % 32 == 0) sums[thread / 32] = total;
        __syncthreads();
        total = rms::total_of<WARPS>(sums);
    }
    const float scale = rms::scale_of<HIDDEN>(total, eps);
    if (!is_in) return;
    const rms::Eight result = rms::normed(v, scale, weights);
#if QUANTISES
    u32x2 codes;
#pragma unroll
    for (int i = 0; i < 2; i++)
        codes.v[i] = rms::to_e4m3(result.v[2 * i], out_scale) | rms::to_e4m3(result.v[2 * i + 1], out_scale) << 16;
    *(u32x2 *)((u8 *)y + at) = codes;
#else
    *(rms::Eight *)((u16 *)y + at) = result;
#endif
}
