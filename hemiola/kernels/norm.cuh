// RMSNorm of a row, by parts: for rms_norm.cu and for kernels that norm their own input, so that all give the same bits.
// Roundings are spelled out, and none is left to how a compiler contracts.
//
// A lane takes eight columns, a warp 256: a span. A lane adds its squares as a tree, a warp its lanes' sums 16, 8, 4, 2
// and 1 apart; then the spans' sums are added, every fourth one to the same of four.

namespace rms {

struct alignas(16) Eight { unsigned int v[4]; };  // bfloat16

// Stays where it is, so behind a wait, and is one of sixteen bytes.
__device__ __forceinline__ Eight load(const unsigned short *p) {
    Eight r;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v[0]), "=r"(r.v[1]), "=r"(r.v[2]), "=r"(r.v[3]) : "l"(p) : "memory");
    return r;
}

// Before a wait: has an address computed, whose line is in the cache already or comes to it.
__device__ __forceinline__ void prefetch(const unsigned short *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

__device__ __forceinline__ void widened(const Eight &from, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = __uint_as_float(from.v[i] << 16);
        to[2 * i + 1] = __uint_as_float(from.v[i] & 0xFFFF0000u);
    }
}

// Two and two bfloat16; one rounding.
__device__ __forceinline__ unsigned int added(unsigned int a, unsigned int b) {
    unsigned int r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(0x3F803F80u), "r"(b));
    return r;
}

__device__ __forceinline__ Eight added(Eight a, const Eight &b) {
#pragma unroll
    for (int i = 0; i < 4; i++) a.v[i] = added(a.v[i], b.v[i]);
    return a;
}

__device__ __forceinline__ unsigned int to_bf16(float first, float second) {
    unsigned int r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}

// Of a span's squares, in every lane. All lanes of the warp; those without columns give zeros.
__device__ __forceinline__ float squares(const float (&v)[8]) {
    float pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = __fmaf_rn(v[2 * i], v[2 * i], __fmul_rn(v[2 * i + 1], v[2 * i + 1]));
    float total = __fadd_rn(__fadd_rn(pairs[0], pairs[1]), __fadd_rn(pairs[2], pairs[3]));
#pragma unroll
    for (int offset = 16; offset; offset /= 2) total = __fadd_rn(total, __shfl_xor_sync(0xFFFFFFFFu, total, offset));
    return total;
}

// Of all spans' sums.
template <int SPANS>
__device__ __forceinline__ float total_of(const float *sums) {
    float parts[4] = {};
#pragma unroll
    for (int i = 0; i < SPANS; i++) parts[i % 4] = __fadd_rn(parts[i % 4], sums[i]);
    return __fadd_rn(__fadd_rn(parts[0], parts[1]), __fadd_rn(parts[2], parts[3]));
}

template <int WIDTH>
__device__ __forceinline__ float scale_of(float total, float eps) {
    return rsqrtf(__fmaf_rn(total, 1.f / WIDTH, eps));
}

// v * scale * weight, rounded once.
__device__ __forceinline__ Eight normed(const float (&v)[8], float scale, const Eight &weight) {
    float w[8];
    widened(weight, w);
    Eight result;
#pragma unroll
    for (int i = 0; i < 4; i++)
        result.v[i] = to_bf16(__fmul_rn(__fmul_rn(v[2 * i], scale), w[2 * i]),
                              __fmul_rn(__fmul_rn(v[2 * i + 1], scale), w[2 * i + 1]));
    return result;
}

#if __CUDA_ARCH__ >= 890
// Two bfloat16, divided: saturating; NaN stays.
__device__ __forceinline__ unsigned int to_e4m3(unsigned int pair, float scale) {
    unsigned short r;
    const float first = __uint_as_float(pair << 16), second = __uint_as_float(pair & 0xFFFF0000u);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(r) : "f"(__fdiv_rn(second, scale)), "f"(__fdiv_rn(first, scale)));
    return r;
}

// The same without branches, but for the sign of zeros. inverse: 1 / scale, to the nearest: with the remainder the
// quotient is so, too; what is far beyond the largest code needs none, and could overflow.
__device__ __forceinline__ unsigned int to_e4m3(unsigned int pair, float scale, float inverse) {
    unsigned short r;
    float q[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float v = __uint_as_float(i ? pair & 0xFFFF0000u : pair << 16), near = __fmul_rn(v, inverse);
        const float better = __fmaf_rn(__fmaf_rn(-near, scale, v), inverse, near);
        q[i] = fabsf(near) < 1024.f ? better : near;
    }
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(q[1]), "f"(q[0]));
    return r;
}
#endif

}  // namespace rms
