// NVFP4 words, as nvfp4.py packs them, to bfloat16 in the order of a product's fragments.
//
// A code's sign and magnitude bits, moved to a bfloat16's sign and to the last bits of its exponent with the first of
// its mantissa, are its value times 2^-126; scales are times 2^119. Their product, e2m1 times e4m3 times 2^-7, is exact
// in bfloat16; what remains belongs to `alpha`.

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}

// 0x0FF00FF0, in a register: an instruction has room for one constant.
__device__ __forceinline__ u32 scale_mask() {
    u32 r;
    asm volatile("mov.u32 %0, 0x0FF00FF0;" : "=r"(r));
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

// The scales of half a word's codes, 0 and 1, and 2 and 3, from a group's word of scales.
__device__ __forceinline__ void spread(u32 scales, int half, u32 mask, u32 &first, u32 &second) {
    first = (__byte_perm(scales, 0, half ? 0x3232 : 0x1010) & mask) | 0x70007000u;
    second = (__byte_perm(scales, 0, half ? 0x2323 : 0x0101) & mask) | 0x70007000u;
}

// Half of two words: its four codes, each beside the other word's.
__device__ __forceinline__ void decode(u32x2 words, u32 scales, int half, u32 mask, u32 (&a)[4]) {
    const u32 m = 0x81C081C0u, w = __byte_perm(words.x, words.y, half ? 0x7632 : 0x5410);
    u32 first, second;
    spread(scales, half, mask, first, second);
    a[0] = mul2(w & m, first);
    a[1] = mul2((w << 3) & m, first);
    a[2] = mul2(((w << 1) & 0x80008000u) | ((w << 6) & 0x01C001C0u), second);
    a[3] = mul2(((w << 2) & 0x80008000u) | ((w >> 3) & 0x01C001C0u), second);
}

// Half of a group of 64 columns, for two products of 16: words of rows g and g + 8, and a word of scales of each.
__device__ __forceinline__ void decode_quarter(u32x2 upper, u32x2 lower, u32x2 scales, int half, u32 mask,
                                               u32 (&first)[4], u32 (&second)[4]) {
    u32 u[4], l[4];
    decode(upper, scales.x, half, mask, u);
    decode(lower, scales.y, half, mask, l);
    first[0] = u[0], first[1] = l[0], first[2] = u[1], first[3] = l[1];
    second[0] = u[2], second[1] = l[2], second[2] = u[3], second[3] = l[3];
}
