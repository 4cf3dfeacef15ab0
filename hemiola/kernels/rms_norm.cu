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
    const float scale = rms::scale_of_row<HIDDEN, WARPS>(thread, v, sums, eps);
    if (is_in) rms::store<QUANTISES>(y, at, rms::normed(v, scale, weights), out_scale);
}
