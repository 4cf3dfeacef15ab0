// The sum of a token's experts, and the next layer's RMSNorm with the addition before it: the bits of combine_kernel
// (experts.py) and then of rms_norm.cu, in one launch. A block a token, a thread eight columns.
//
// What the one would write and the other read stays in registers. As in rms_norm.cu, all that can be done before the
// wait for the kernel before is; behind it, all rows are asked for before any is added.
//
// Behind norm.cuh. Defined from outside: HIDDEN (a multiple of 8, at most 8192), TOP_K, PAIRS (rows of parts a token),
// NUM_SHARED (pieces of the shared expert), SHARED (0 or 1: its part is a row, and there are no pieces), QUANTISES (0 or
// 1; needs sm_89).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int THREADS = (HIDDEN / 8 + 31) / 32 * 32, WARPS = THREADS / 32;

__device__ __forceinline__ rms::Eight rounded(const float (&v)[8]) {
    rms::Eight result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.v[i] = rms::to_bf16(v[2 * i], v[2 * i + 1]);
    return result;
}

// parts, pieces: rows of HIDDEN. shared, residual: rows so many numbers apart. sum: the new residual. y: bfloat16, or
// e4m3 of y / out_scale.
extern "C" __global__ void __launch_bounds__(THREADS) combine_norm_kernel(
    const u16 *parts, const float *pieces, const u16 *shared, i64 shared_stride, float routed_scale, const u16 *residual,
    i64 residual_stride, const u16 *weight, void *y, u16 *sum, float eps, float out_scale) {
    __shared__ __align__(16) float sums[(WARPS + 3) / 4 * 4];
    const int thread = threadIdx.x, column = thread * 8;
    const bool is_in = HIDDEN == THREADS * 8 || column < HIDDEN;
    const i64 token = blockIdx.x, at = token * HIDDEN + column;
    const u16 *from = parts + token * PAIRS * HIDDEN + column, *added_from = residual + token * residual_stride + column;
    rms::Eight weights = {};
    float v[8] = {};
    if (is_in) {
        weights = rms::load(weight + column);
        rms::prefetch(added_from);
    }
    gdc_wait();
    gdc_launch_dependents();
    if (is_in) {
        rms::Eight part[TOP_K], together;
#pragma unroll
        for (int k = 0; k < TOP_K; k++) part[k] = rms::load(from + k * HIDDEN);
        if (SHARED) together = rms::load(shared + token * shared_stride + column);
        const rms::Eight others = rms::load(added_from);
#if NUM_SHARED
        float piece[8] = {};
#pragma unroll
        for (int k = 0; k < NUM_SHARED; k++) {
            const float4 *four = (const float4 *)(pieces + (token * NUM_SHARED + k) * HIDDEN + column);
            const float4 low = four[0], high = four[1];
            const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 8; i++) piece[i] = __fadd_rn(piece[i], values[i]);
        }
        together = rounded(piece);
#endif
        float routed[8] = {};
#pragma unroll
        for (int k = 0; k < TOP_K; k++) {
            rms::widened(part[k], v);
#pragma unroll
            for (int i = 0; i < 8; i++) routed[i] = __fadd_rn(routed[i], v[i]);
        }
        rms::widened(rounded(routed), v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], routed_scale);
        rms::Eight own = rounded(v);
        if (SHARED || NUM_SHARED) own = rms::added(own, together);
        own = rms::added(own, others);
        *(rms::Eight *)(sum + at) = own;
        rms::widened(own, v);
    }
    const float scale = rms::scale_of_row<HIDDEN, WARPS>(thread, v, sums, eps);
    if (is_in) rms::store<QUANTISES>(y, at, rms::normed(v, scale, weights), out_scale);
}
