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

// The scale of a row whose columns a block's threads have eight each, in all of them; one barrier. sums: room for a number
// a warp, in shared memory.
template <int WIDTH, int NUM_WARPS>
__device__ __forceinline__ float scale_of_row(int thread, const float (&v)[8], float (&sums)[(NUM_WARPS + 3) / 4 * 4], float eps) {
    float total = squares(v);
    if (NUM_WARPS > 1) {
        if (thread % 32 == 0) sums[thread / 32] = total;
        __syncthreads();
        total = total_of<NUM_WARPS>(sums);
    }
    return scale_of<WIDTH>(total, eps);
}

// Eight to y, from its number `at` on: as they are, or AS_CODES, e4m3 of v / out_scale, which needs sm_89.
template <bool AS_CODES>
__device__ __forceinline__ void store(void *y, long long at, const Eight &v, float out_scale) {
    if constexpr (AS_CODES) {
#if __CUDA_ARCH__ >= 890
        struct alignas(8) { unsigned int v[2]; } codes;
#pragma unroll
        for (int i = 0; i < 2; i++) codes.v[i] = to_e4m3(v.v[2 * i], out_scale) | to_e4m3(v.v[2 * i + 1], out_scale) << 16;
        *(decltype(codes) *)((unsigned char *)y + at) = codes;
#endif
    } else {
        *(Eight *)((unsigned short *)y + at) = v;
    }
}

// Rows normed by a block: its warps share out their spans, and a lane has eights of columns, OWN at most. Where
// has[i], the i-th begins at column starts[i] of row rows[i]. For each: place, prefetch, the wait, read, normed.
template <int NUM_ROWS, int WIDTH, int NUM_WARPS, bool ADDS>
struct BlockRows {
    static constexpr int SPANS = (WIDTH + 255) / 256, OWN = (NUM_ROWS * SPANS + NUM_WARPS - 1) / NUM_WARPS;
    struct Shared {
        alignas(16) float squares[NUM_ROWS][(SPANS + 3) / 4 * 4];
    };
    int warp, lane, rows[OWN], starts[OWN];
    bool has[OWN];
    Eight sums[OWN];  // x, or x + residual

    __device__ __forceinline__ BlockRows(int warp, int lane) : warp(warp), lane(lane) {}

    __device__ __forceinline__ void place(int i) {
        const int span = warp + i * NUM_WARPS;
        rows[i] = span / SPANS;
        starts[i] = (span % SPANS * 32 + lane) * 8;
        has[i] = span < NUM_ROWS * SPANS && starts[i] < WIDTH;
    }

    // The i-th eight, before the wait for the kernel before. x, residual: rows so many numbers apart.
    __device__ __forceinline__ void prefetch(int i, const unsigned short *x, long long x_stride,
                                             const unsigned short *residual, long long residual_stride) const {
        if (has[i]) rms::prefetch(x + rows[i] * x_stride + starts[i]);
        if (ADDS && has[i]) rms::prefetch(residual + rows[i] * residual_stride + starts[i]);
    }

    // Behind the wait: `sums`, and all spans' squares, with the block's next barrier.
    __device__ __forceinline__ void read(const unsigned short *x, long long x_stride, const unsigned short *residual,
                                         long long residual_stride, Shared &shared) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            sums[i] = {};
            if (has[i]) sums[i] = load(x + rows[i] * x_stride + starts[i]);
        }
        if (ADDS) {
            Eight others[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (has[i]) others[i] = load(residual + rows[i] * residual_stride + starts[i]);
#pragma unroll
            for (int i = 0; i < OWN; i++)
                if (has[i]) sums[i] = added(sums[i], others[i]);
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (warp + i * NUM_WARPS >= NUM_ROWS * SPANS) continue;
            float values[8];
            widened(sums[i], values);
            const float total = squares(values);
            if (lane == 0) shared.squares[rows[i]][(warp + i * NUM_WARPS) % SPANS] = total;
        }
    }

    // The i-th eight, of which `has[i]`. weight: of its columns.
    __device__ __forceinline__ Eight normed(int i, const Eight &weight, float eps, const Shared &shared) const {
        float values[8];
        widened(sums[i], values);
        const float scale = scale_of<WIDTH>(total_of<SPANS>(shared.squares[rows[i]]), eps);
        return rms::normed(values, scale, weight);
    }
};

}  // namespace rms
