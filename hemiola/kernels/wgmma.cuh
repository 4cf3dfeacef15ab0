// What the kernels for Hopper's wgmma share: barriers and rings in shared memory, clusters, products under way, results.
//
// With SPIN_LIMIT_NS nothing waits longer at a barrier; the kernel traps instead.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

struct u32x2 { u32 x, y; };
struct alignas(16) u32x4 { u32 x, y, z, w; };

__device__ __forceinline__ u32 address_of(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool has_turned(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done != 0;
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
#ifdef SPIN_LIMIT_NS
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    while (!has_turned(barrier, parity)) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > SPIN_LIMIT_NS) asm volatile("trap;");
    }
#else
    while (!has_turned(barrier, parity)) {}
#endif
}

// A ring of COUNT places of shared memory, seen by one side: where it stands, and how often it has been around. A barrier
// for each says that it is full, another one that it is empty.
template <u32 BYTES, u32 COUNT>
struct PlaceRing {
    u32 first, barriers, stage = 0, parity = 0;

    __device__ __forceinline__ u32 at() const { return first + stage * BYTES; }
    __device__ __forceinline__ u32 full() const { return barriers + stage * 8; }
    __device__ __forceinline__ u32 empty() const { return barriers + (COUNT + stage) * 8; }
    __device__ __forceinline__ void wait_full() const { wait(full(), parity); }
    __device__ __forceinline__ void wait_empty() const { wait(empty(), parity ^ 1); }
    __device__ __forceinline__ void prepare(u32 writers, u32 readers) const {
        for (u32 i = 0; i < COUNT; i++) {
            init(barriers + i * 8, writers);
            init(barriers + (COUNT + i) * 8, readers);
        }
    }
    __device__ __forceinline__ void step() {
        if (++stage == COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// What was written to shared memory before is seen by the whole cluster after its cluster_wait.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 address_in(u32 address, u32 block) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(block));
    return r;
}

__device__ __forceinline__ void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// What the tensor cores read or write meanwhile keeps its registers until here, and is not computed before.
__device__ __forceinline__ void pin(float &v) { asm volatile("" : "+f"(v) :: "memory"); }
__device__ __forceinline__ void pin(u32 &v) { asm volatile("" : "+r"(v) :: "memory"); }
template <typename T, int N>
__device__ __forceinline__ void pin(T (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) pin(v[i]);
}

// An operand in shared memory: rows of 128 bytes, eight of which follow on each other; with 128-byte swizzle.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// As in quantize.py.
__device__ __forceinline__ float quotient(float x, float scale, float inverse) {
    const float q = fminf(fmaxf(__fmul_rn(x, inverse), -1024.f), 1024.f);
    return __fmaf_rn(__fmaf_rn(q, -scale, x), inverse, q);
}

// Two bfloat16, divided, to e4m3: saturating; NaN stays. inverse: 1 / scale, to the nearest.
__device__ __forceinline__ u32 to_e4m3(u32 v, float scale, float inverse) {
    u16 r;
    const float low = quotient(__uint_as_float(v << 16), scale, inverse);
    const float high = quotient(__uint_as_float(v & 0xFFFF0000u), scale, inverse);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

// Two float32 to bfloat16, and their squared ReLU from there, rounded. NaN stays.
__device__ __forceinline__ u32 finished(float first, float second, bool relu_squared) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    if (relu_squared) {
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(r) : "r"(0u));
        asm("fma.rn.bf16x2 %0, %0, %0, %1;" : "+r"(r) : "r"(0x80008000u));
    }
    return r;
}
