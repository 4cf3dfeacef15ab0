// NVFP4 words, as nvfp4.py packs them, to bfloat16.
//
// A code's sign and magnitude bits, moved to a bfloat16's sign and to the last bits of its exponent with the first of
// its mantissa, are its value times 2^-126; scales are times 2^119. Their product, e2m1 times e4m3 times 2^-7, is exact
// in bfloat16; what remains belongs to `alpha`.

typedef unsigned int u32;

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}

// The scales of a lane's words in a tile: those of the first two and of the last two pairs of codes of each.
__device__ __forceinline__ void spread(u32 scales, u32 &first, u32 &second) {
    first = (scales & 0x0FF00FF0u) | 0x70007000u;
    second = (__byte_perm(scales, 0, 0x2301) & 0x0FF00FF0u) | 0x70007000u;
}

// A word's eight codes as four pairs.
__device__ __forceinline__ void decode(u32 w, u32 first, u32 second, u32 (&a)[4]) {
    const u32 m = 0x81C081C0u;
    a[0] = mul2(w & m, first);
    a[1] = mul2((w << 3) & m, first);
    a[2] = mul2(((w << 1) & 0x80008000u) | ((w << 6) & 0x01C001C0u), second);
    a[3] = mul2(((w << 2) & 0x80008000u) | ((w >> 3) & 0x01C001C0u), second);
}
