// Products of many tokens with NVFP4 weights: decoded in registers, straight into the fragments of Hopper's wgmma.
//
// Weights are the tiles of nvfp4.py and wgmma's A operand, from registers; rows of x are its B operand, in shared
// memory with 128-byte swizzle. A product's 16 columns are 16 of x that follow on each other, so x stays as it is: lane
// (g = lane / 4, t = lane % 4) reads words 2 t and 2 t + 1 of each group of 64 columns, whose codes j are columns
// 8 j + 2 t and 8 j + 2 t + 1, which the fragment wants side by side. Its rows are g and g + 8 of a tile of 16.
//
// A block is one warpgroup that copies rows of x into a ring of stages, 128 columns each, and two that multiply, 128
// rows of weights each: while the tensor cores work on 32 columns of 64 rows, the next ones are decoded. Blocks stay,
// and take items, a tile of tokens times 256 rows of weights, from a counter, which the last block sets back to 0.
//
// A sum runs over the columns in order, in one accumulator: it does not depend on the tile or on other tokens.
//
// With SPLITS it is another kernel, of a linear alone: a cluster of so many blocks is an item, and shares its columns
// out. Each block adds all blocks' sums, out of their shared memory and in their order, for a share of the tokens.
//
// Behind wgmma.cuh and nvfp4.cuh. Defined from outside: WGMMA_KERNEL (a name, by which a trace tells what it is for), and product(), a
// wgmma of 64 rows, 16 columns and N tokens: see nvfp4_wgmma.py; with SPLITS also TILE_TOKENS and TILE_ROWS, of an item,
// and EARLY, or not.

#ifndef WGMMA_KERNEL
#define WGMMA_KERNEL wgmma_kernel
#endif

// TOKENS: the most of a tile. TILES: of 64 rows of weights, of a warpgroup. LAG: copies of so many stages are under way
// before one is waited for. DECODED: quarters of a step, being multiplied or next.
#ifdef SPLITS
constexpr int TOKENS = TILE_TOKENS, TILES = TILE_ROWS / 128;
constexpr int STAGES = TOKENS < 64 ? 8 : 512 / TOKENS, LAG = STAGES < 8 ? STAGES - 2 : 4;
constexpr int DECODED = TOKENS * TILES > 192 ? 2 : 4;
#else
constexpr int TOKENS = 128, TILES = 2, STAGES = 4, LAG = 2, DECODED = 2;
#endif
constexpr int UNIT = 64 * TILES;  // rows of weights of a warpgroup
constexpr int WARPGROUP = 128;
constexpr u32 HALF_BYTES = TOKENS * 128, STAGE_BYTES = 2 * HALF_BYTES, STAGING_BYTES = TOKENS * UNIT * 2;
static_assert(LAG + 2 <= STAGES, "a stage is given back while the next one is multiplied, and may wait for its copy");

// An item: what its tile of tokens is, and where its rows begin. count: its tokens, 0 when there are no more items.
struct Slot {
    int item, expert, first_unit, count, counts[4];
    int pairs[TOKENS];
    float weights[TOKENS];
};

struct Shared {
#ifndef SPLITS
    Slot slots[2];
#endif
    u64 full[STAGES], empty[STAGES], slot_full[2], slot_empty[2];
};

// ------------------------------------------------------------------------------------------------ instructions

template <int ID>
__device__ __forceinline__ void sync_warpgroup(int offset = 0) {
    asm volatile("bar.sync %0, %1;" :: "r"(ID + offset), "n"(WARPGROUP) : "memory");
}

// Nothing is read where !is_there: zeros.
__device__ __forceinline__ void copy_async(u32 to, const void *from, bool is_there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

__device__ __forceinline__ u32x2 load(const void *p) {
    u32x2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ void fetch_to_l2(const void *p, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(bytes) : "memory");
}

// Two bfloat16, divided, to e4m3: saturating; NaN stays.
__device__ __forceinline__ u32 to_e4m3(u32 v, float scale) {
    u16 r;
    const float low = __uint_as_float(v << 16), high = __uint_as_float(v & 0xFFFF0000u);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(__fdiv_rn(high, scale)), "f"(__fdiv_rn(low, scale)));
    return r;
}

// ---------------------------------------------------------------------------------------------------- weights

// 0x0FF00FF0, in a register: an instruction has room for one constant.
__device__ __forceinline__ u32 scale_mask() {
    u32 r;
    asm volatile("mov.u32 %0, 0x0FF00FF0;" : "=r"(r));
    return r;
}

// The scales of half a word's codes, 0 and 1, and 2 and 3, from a group's word of scales.
__device__ __forceinline__ void spread(u32 scales, int half, u32 mask, u32 &first, u32 &second) {
    first = (__byte_perm(scales, 0, half ? 0x3232 : 0x1010) & mask) | 0x70007000u;
    second = (__byte_perm(scales, 0, half ? 0x2323 : 0x0101) & mask) | 0x70007000u;
}

// Half of two words: its four codes, each beside the other word's.
__device__ __forceinline__ void decode(u32x2 words, u32 scales, int half, u32 mask, u32 (&a)[4]) {
    u32 first, second;
    spread(scales, half, mask, first, second);
    decode(__byte_perm(words.x, words.y, half ? 0x7632 : 0x5410), first, second, a);
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

// A lane's part of a warp's tiles of 16 rows, 64 rows apart: rows g and g + 8, of one step of 128 columns.
struct Weights {
    const u8 *codes;
    const u8 *scales;
    u32 codes_at[TILES], scales_at[TILES];  // bytes from there, of the step that is loaded next
    u32x2 upper[TILES][2], lower[TILES][2], row_scales[TILES][2];  // by tile and group of 64 columns; scales: both rows
    u32 mask;

    // Tiles past the end repeat the last one.
    __device__ __forceinline__ void start(const u8 *codes_, const u8 *scales_, int expert, int unit, int num_rows,
                                          int row_bytes, int first_step) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t = lane % 4;
        const i64 bank = (i64)expert * num_rows * row_bytes;
        mask = scale_mask();
        codes = codes_ + bank;
        scales = scales_ + bank / 8;
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            const u32 tile = min(unit * (4 * TILES) + b * 4 + warp, (num_rows - 1) / 16);
            const u32 at = tile * (row_bytes / 64) + first_step;
            codes_at[b] = at * 1024 + g * 64 + t * 8;
            scales_at[b] = at * 128 + g * 16;
        }
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            load_group(b, 0);
            load_group(b, 1);
        }
        step();
    }

    __device__ __forceinline__ void step() {
#pragma unroll
        for (int b = 0; b < TILES; b++) {
            codes_at[b] += 1024;
            scales_at[b] += 128;
        }
    }

    __device__ __forceinline__ void load_group(int b, int group) {
        upper[b][group] = load(codes + codes_at[b] + group * 32);
        lower[b][group] = load(codes + codes_at[b] + group * 32 + 512);
        row_scales[b][group] = load(scales + scales_at[b] + group * 8);
    }

    // Columns 32 q .. of the step of tile b, for two products of 16.
    __device__ __forceinline__ void decode_quarter(int b, int q, u32 (&a)[2][4]) const {
        const int group = q / 2, half = q % 2;
        ::decode_quarter(upper[b][group], lower[b][group], row_scales[b][group], half, mask, a[0], a[1]);
    }
};

// The stages of x, seen by one side: where it stands, and how often it has been around.
struct Ring {
    u32 stage = 0, parity = 0;
    u32 full, empty;  // the first barrier of each

    __device__ __forceinline__ void step() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void wait_full() const { wait(full + stage * 8, parity); }
    __device__ __forceinline__ void wait_empty() const { wait(empty + stage * 8, parity ^ 1); }
};

// ------------------------------------------------------------------------------------------------ the warpgroups

// The producer's side of the ring. A thread copies the piece `piece` of 16 bytes of both halves of rows
// first_row + 16 i.
struct Copies {
    Ring ring;
    u32 to, ready = 0;  // ready: the first stage that has not been told to be full
    int piece, first_row;

    __device__ __forceinline__ Copies(u8 *ring_memory, Shared &shared)
        : ring{0, 0, address_of(shared.full), address_of(shared.empty)}, piece(threadIdx.x % 8),
          first_row(threadIdx.x % WARPGROUP / 8) {
        to = address_of(ring_memory) + first_row * 128 + (piece ^ first_row % 8) * 16;
    }

    __device__ __forceinline__ void tell() {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(ring.full + ready * 8);
        ready = ready + 1 == STAGES ? 0 : ready + 1;
    }

    // Steps first .. last of `count` rows of x; the last LAG are not told of. row_at: where this thread's rows begin,
    // in pieces.
    __device__ __forceinline__ void run(const u16 *x, int columns, const u32 (&row_at)[TOKENS / 16], int count,
                                        int first, int last) {
        for (int step = first; step < last; step++) {
            ring.wait_empty();
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = step * 128 + half * 64 + piece * 8;
                const bool is_column = column < columns;
                const u16 *from = x + (is_column ? column : 0);
#pragma unroll
                for (int i = 0; i < TOKENS / 16; i++)
                    if (first_row + i * 16 < count)
                        copy_async(to + ring.stage * STAGE_BYTES + half * HALF_BYTES + i * 2048,
                                   from + (i64)row_at[i] * 8, is_column);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (step - first >= LAG) {
                asm volatile("cp.async.wait_group %0;" :: "n"(LAG) : "memory");
                tell();
            }
            ring.step();
        }
    }

    // What `run` has not told of so many steps: when all is there, or one after the other.
    __device__ __forceinline__ void tell_all(int steps) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        for (int i = 0; i < min(LAG, steps); i++) tell();
    }
    template <int LEFT = LAG - 1>
    __device__ __forceinline__ void tell_each(int steps) {
        if (steps > LEFT) {
            asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
            tell();
        }
        if constexpr (LEFT > 0) tell_each<LEFT - 1>(steps);
    }
};

// The sums of a warpgroup's rows of weights for `steps` steps of columns, one at least. Weights of the first are there.
template <int N>
__device__ __forceinline__ void multiply(float (&acc)[TILES][N / 2], Weights &weights, Ring &ring, u32 ring_memory,
                                         int steps) {
    u32 a[DECODED][2][4];
#pragma unroll
    for (int b = 0; b < TILES; b++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[b][i] = 0.f;
#ifdef SPLITS
    pin(acc);  // or ptxas lets products wait for each other
#endif
    weights.decode_quarter(0, 0, a[0]);
    u32 last_stage = 0;
    for (int step = 0; step < steps; step++) {
        const bool is_more = step + 1 < steps;
        ring.wait_full();
        // The same in all lanes, which lets it stay in a uniform register.
        const u32 memory = __shfl_sync(0xFFFFFFFFu, ring_memory + ring.stage * STAGE_BYTES, 0);
        const u64 rows = operand(memory);
#pragma unroll
        for (int i = 0; i < 4 * TILES; i++) {  // quarter i / TILES of tile i % TILES
            const int q = i / TILES, next = (i + 1) % (4 * TILES), next_tile = next % TILES, next_q = next / TILES;
            pin(a[i % DECODED]);
            open_products();
#pragma unroll
            for (int p = 0; p < 2; p++)
                product<N>(acc[i % TILES], a[i % DECODED][p], rows + q / 2 * (HALF_BYTES >> 4) + q % 2 * 4 + p * 2);
            close_products();
            wait_for_products<DECODED - 1>();
            pin(a[next % DECODED]);
            if (i == DECODED - 2 && step > 0 && threadIdx.x % 32 == 0) arrive(ring.empty + last_stage * 8);
            weights.decode_quarter(next_tile, next_q, a[next % DECODED]);
            // The words of a group of 64 columns are decoded: those of the next step take their place.
            if (next_q % 2 == 1 && is_more) weights.load_group(next_tile, next_q / 2);
        }
        weights.step();
        last_stage = ring.stage;
        ring.step();
    }
    wait_for_products<0>();
    pin(a);
    pin(acc);
    if (threadIdx.x % 32 == 0) arrive(ring.empty + last_stage * 8);
}

#ifndef SPLITS
// ---------------------------------------------------------------------------------------------- items of a counter

// What the kernel is given.
struct Given {
    const u16 *x;
    i64 x_stride;
    const u8 *codes, *scales;
    const float *alpha;
    const int *sorted_pairs, *experts, *num_tiles;
    const float *pair_weights;
    void *out;
    float *pieces;
    int *counter;
    float one_alpha, out_scale;
    int num_tokens, pairs_per_x, pairs_per_token, num_shared, routed, num_rows, columns, row_bytes, tile_tokens;
    int tile_units, flags;

    // Where a pair stands among its token's pairs is not asked here: those of the routing come first.
    __device__ __forceinline__ float weight_of(int pair) const {
        return pair_weights[pair - pair / pairs_per_token * num_shared];
    }
    // Whether an expert's down projection is one of the pieces of the shared expert.
    __device__ __forceinline__ bool is_piece(int expert) const { return pair_weights != nullptr && expert >= routed; }
};

__device__ __forceinline__ void produce(const Given &given, u8 *ring_memory, Shared &shared) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp = thread / 32;
    const int steps = given.row_bytes / 64, units = (given.num_rows + UNIT - 1) / UNIT;
    const int row_tiles = (units + given.tile_units - 1) / given.tile_units;
    const int tiles = given.sorted_pairs != nullptr ? *given.num_tiles
                                                    : (given.num_tokens + given.tile_tokens - 1) / given.tile_tokens;
    Copies copies(ring_memory, shared);
    int n = 0;
    for (;; n++) {
        Slot &slot = shared.slots[n & 1];
        if (thread == 0) {
            wait(address_of(&shared.slot_empty[n & 1]), (n >> 1 & 1) ^ 1);
            slot.item = atomicAdd(given.counter, 1);
        }
        sync_warpgroup<1>();
        const int item = slot.item, tile = item / row_tiles;
        if (tile >= tiles) break;
        int pair = given.num_tokens, expert = 0;
        if (thread < given.tile_tokens) {
            pair = tile * given.tile_tokens + thread;
            if (given.sorted_pairs != nullptr) pair = given.sorted_pairs[pair];
        }
        if (given.experts != nullptr) expert = given.experts[tile];
        const bool is_pair = pair < given.num_tokens;
        slot.pairs[thread] = pair;
        const bool is_weighted = is_pair && given.pair_weights != nullptr && !given.is_piece(expert);
        slot.weights[thread] = is_weighted ? given.weight_of(pair) : 1.f;
        const int in_warp = __popc(__ballot_sync(0xFFFFFFFFu, is_pair));
        if (lane == 0) slot.counts[warp] = in_warp;
        sync_warpgroup<1>();
        const int count = slot.counts[0] + slot.counts[1] + slot.counts[2] + slot.counts[3];
        const int first_unit = item % row_tiles * given.tile_units;
        if (thread == 0) {
            slot.expert = expert;
            slot.first_unit = first_unit;
            slot.count = count;
            arrive(address_of(&shared.slot_full[n & 1]));
        }
        // The first tile of an expert brings its weights from memory, before the others come.
        if (tile == 0 || (given.experts != nullptr && given.experts[tile - 1] != expert)) {
            const int first = first_unit * 8 + thread;
            if (thread < given.tile_units * 8 && first * 16 < given.num_rows) {
                const i64 at = ((i64)expert * given.num_rows + first * 16) * given.row_bytes;
                fetch_to_l2(given.codes + at, given.row_bytes * 16);
                fetch_to_l2(given.scales + at / 8, given.row_bytes * 2);
            }
        }
        u32 row_at[TOKENS / 16];  // in pieces
#pragma unroll
        for (int i = 0; i < TOKENS / 16; i++) {
            const int row = min(copies.first_row + i * 16, count - 1);
            row_at[i] = (u32)(slot.pairs[row] / given.pairs_per_x) * (u32)(given.x_stride / 8);
        }
        copies.run(given.x, given.columns, row_at, count, 0, steps);
        copies.tell_all(steps);
    }
    if (thread == 0) {
        shared.slots[n & 1].count = 0;
        arrive(address_of(&shared.slot_full[n & 1]));
        if (atomicAdd(given.counter + 1, 1) == gridDim.x - 1) given.counter[0] = given.counter[1] = 0;
    }
}

// Sums to where they belong, through shared memory: there a token has 16 pieces of eight rows.
template <int N>
__device__ __forceinline__ void write(const float (&acc)[2][N / 2], const Given &given, const Slot &slot, u8 *staging,
                                      int warpgroup, int unit) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp = thread / 32, t = lane % 4;
    const float alpha = given.alpha != nullptr ? given.alpha[slot.expert] : given.one_alpha;
    const bool relu_squared = given.flags & 1;
    if (given.is_piece(slot.expert)) {
        const int piece = slot.expert - given.routed;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int token = j * 8 + t * 2 + i;
                if (token >= slot.count) continue;
                const i64 at = (i64)(slot.pairs[token] / given.pairs_per_token) * given.num_shared + piece;
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    const int row = unit * UNIT + b / 2 * 64 + warp * 16 + b % 2 * 8 + lane / 4;
                    if (row < given.num_rows)
                        given.pieces[at * given.num_rows + row] = acc[b / 2][j * 4 + b % 2 * 2 + i] * alpha;
                }
            }
        }
        return;
    }
    const u32 to = address_of(staging) + (lane / 16 * 8 + lane % 8) * 256;
    sync_warpgroup<2>(warpgroup);
#pragma unroll
    for (int n = 0; n < N / 16; n++) {
        float factor[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) factor[i / 2][i % 2] = slot.weights[n * 16 + i / 2 * 8 + t * 2 + i % 2];
#pragma unroll
        for (int b = 0; b < 2; b++) {
            u32 r[4];  // by eight tokens, and by eight rows
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *v = acc[b] + (n * 2 + i / 2) * 4 + i % 2 * 2;
                r[i] = finished(v[0] * alpha * factor[i / 2][0], v[1] * alpha * factor[i / 2][1], relu_squared);
            }
            const int piece = (b * 4 + warp) * 2 + lane / 8 % 2;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                         :: "r"(to + n * 4096 + (piece ^ lane % 8) * 16), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                         : "memory");
        }
    }
    sync_warpgroup<2>(warpgroup);
    const int piece = thread % 16, row = unit * UNIT + piece * 8;
    if (row < given.num_rows) {
        for (int token = thread / 16; token < slot.count; token += 8) {
            const u32x4 v = *(const u32x4 *)(staging + token * 256 + (piece ^ token % 8) * 16);
            const i64 at = (i64)slot.pairs[token] * given.num_rows + row;
            if (given.flags & 4) {
                const float scale = given.out_scale;
                u32x2 bytes;
                bytes.x = to_e4m3(v.x, scale) | to_e4m3(v.y, scale) << 16;
                bytes.y = to_e4m3(v.z, scale) | to_e4m3(v.w, scale) << 16;
                *(u64 *)((u8 *)given.out + at) = bytes.x | (u64)bytes.y << 32;
            } else {
                *(u32x4 *)((u16 *)given.out + at) = v;
            }
        }
    }
}

struct Consumer {
    const Given &given;
    Shared &shared;
    u8 *staging;
    u32 ring_memory;
    int warpgroup, n = 0;  // n: items so far
    Ring ring;
    Weights weights;

    __device__ __forceinline__ const Slot &slot() const { return shared.slots[n & 1]; }
    __device__ __forceinline__ int unit() const { return slot().first_unit + warpgroup; }
    __device__ __forceinline__ bool has_rows() const {
        return warpgroup < given.tile_units && unit() * UNIT < given.num_rows;
    }

    // Waits for the item's slot, and loads its first weights.
    __device__ __forceinline__ void begin() {
        wait(address_of(&shared.slot_full[n & 1]), n >> 1 & 1);
        if (slot().count > 0 && has_rows())
            weights.start(given.codes, given.scales, slot().expert, unit(), given.num_rows, given.row_bytes, 0);
    }

    // The next item begins before this one is written.
    template <int N>
    __device__ __forceinline__ void run() {
        float acc[2][N / 2];
        multiply<N>(acc, weights, ring, ring_memory, given.row_bytes / 64);
        const Slot &own = slot();
        const int own_unit = unit();
        n++;
        begin();
        write<N>(acc, given, own, staging, warpgroup, own_unit);
    }

    __device__ __forceinline__ void consume() {
        begin();
        while (slot().count > 0) {
            const int own = n & 1;
            if (!has_rows()) {
                for (int step = 0; step < given.row_bytes / 64; step++) {
                    ring.wait_full();
                    __syncwarp();
                    if (threadIdx.x % 32 == 0) arrive(ring.empty + ring.stage * 8);
                    ring.step();
                }
                n++;
                begin();
            } else {
                const int quarters = (slot().count + 31) / 32;
                if (quarters == 4) run<128>();
                else if (quarters == 3) run<96>();
                else if (quarters == 2) run<64>();
                else run<32>();
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(address_of(&shared.slot_empty[own]));
        }
    }
};

// Up to `tile_tokens` tokens or pairs times tile_units * 128 rows of one weight: an item. alpha: by expert; null:
// one_alpha. Rows of x lie x_stride elements apart, a multiple of 8, as are `columns` and num_rows; row_bytes is a
// multiple of 64.
//
// With sorted_pairs: tile i is those of sorted_pairs[tile_tokens * i ..] that are below num_tokens, which come first,
// and its expert is experts[i]; there are *num_tiles. Without: tokens of one weight. Row p / pairs_per_x of x belongs
// to pair p. counter: two zeros, which they are again in the end. With pair_weights experts from `routed` on, of which
// each token takes num_shared as the last of its pairs_per_token, are pieces of the shared expert: float32, not weighted,
// into pieces (tokens, num_shared, rows).
// flags: 1 squared ReLU, 4 quantised with out_scale to e4m3 (out is bytes then).
extern "C" __global__ void __launch_bounds__(3 * WARPGROUP, 1) WGMMA_KERNEL(
    const u16 *x, i64 x_stride, const u8 *codes, const u8 *scales, const float *alpha, const int *sorted_pairs,
    const int *experts, const int *num_tiles, const float *pair_weights, void *out, float *pieces, int *counter,
    float one_alpha, float out_scale, int num_tokens, int pairs_per_x, int pairs_per_token, int num_shared, int routed,
    int num_rows, int columns, int row_bytes, int tile_tokens, int tile_units, int flags) {
    extern __shared__ u8 memory[];
    u8 *base = memory + (-address_of(memory) & 1023);
    u8 *staging = base + STAGES * STAGE_BYTES;
    Shared &shared = *(Shared *)(staging + 2 * STAGING_BYTES);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init(address_of(&shared.full[i]), 4);   // a warp of the producer each
            init(address_of(&shared.empty[i]), 8);  // a warp of the consumers each
        }
        for (int i = 0; i < 2; i++) {
            init(address_of(&shared.slot_full[i]), 1);
            init(address_of(&shared.slot_empty[i]), 8);
        }
    }
    __syncthreads();
    gdc_wait();
    gdc_launch_dependents();
    const Given given{x, x_stride, codes, scales, alpha, sorted_pairs, experts, num_tiles, pair_weights, out, pieces,
                      counter, one_alpha, out_scale, num_tokens, pairs_per_x, pairs_per_token, num_shared, routed,
                      num_rows, columns, row_bytes, tile_tokens, tile_units, flags};
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        produce(given, base, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Consumer consumer{given, shared, staging + (warpgroup - 1) * STAGING_BYTES, address_of(base), warpgroup - 1, 0,
                          Ring{0, 0, address_of(shared.full), address_of(shared.empty)}};
        consumer.consume();
    }
}

#else
// --------------------------------------------------------------------------------- columns that a cluster shares out

#ifdef EARLY
constexpr bool IS_EARLY = true;
#else
constexpr bool IS_EARLY = false;
#endif
constexpr int CONSUMERS = 2 * WARPGROUP;
constexpr u32 PART_BYTES = 16 * 64 * 2;  // of a result: 16 tokens, 64 rows
static_assert(TOKENS * TILES * 2 * 64 * 4 <= STAGES * STAGE_BYTES, "sums take the place of the stages");
static_assert(TOKENS / 16 * TILES * PART_BYTES == STAGING_BYTES, "a block of a cluster of one finishes all parts");

struct alignas(16) f32x4 { float v[4]; };

__device__ __forceinline__ f32x4 load_from_cluster(u32 address) {
    f32x4 r;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(r.v[0]), "=f"(r.v[1]), "=f"(r.v[2]), "=f"(r.v[3]) : "r"(address) : "memory");
    return r;
}

// What a block does: steps of columns of a tile of tokens and two units of rows. rank: in the item's cluster.
struct Item {
    int rank, first_token, count, first_unit, first_step, last_step;

    __device__ __forceinline__ Item(int num_tokens, int row_bytes) {
        const int all_steps = row_bytes / 64, token_tiles = (num_tokens + TOKENS - 1) / TOKENS;
        const int item = blockIdx.x / SPLITS;
        rank = blockIdx.x % SPLITS;
        first_token = item % token_tiles * TOKENS;
        count = min(num_tokens - first_token, TOKENS);
        first_unit = item / token_tiles * 2;
        first_step = all_steps * rank / SPLITS;
        last_step = all_steps * (rank + 1) / SPLITS;
    }
    __device__ __forceinline__ int steps() const { return last_step - first_step; }
};

// Two warpgroups' side of a block. A part of the item's sums is 16 tokens times 64 rows of each warpgroup, eight sums
// of a lane: part n * TILES + b is tokens 16 n .. of tile b.
struct Consumer {
    const u8 *codes, *scales;
    void *out;
    float alpha, out_scale;
    int num_rows, row_bytes, flags;
    Item item;
    int unit, warpgroup;
    u32 ring_memory, staging;
    Ring ring;

    __device__ __forceinline__ void consume() {
        Weights weights;
        const bool has_rows = unit * UNIT < num_rows;
        if (has_rows) weights.start(codes, scales, 0, unit, num_rows, row_bytes, item.first_step);
        if (!IS_EARLY) gdc_wait();
        if (!has_rows) {
            for (int step = item.first_step; step < item.last_step; step++) {
                ring.wait_full();
                __syncwarp();
                if (threadIdx.x % 32 == 0) arrive(ring.empty + ring.stage * 8);
                ring.step();
            }
            free_stages();
        } else {
            const int quarters = (item.count + 31) / 32;
            if (TOKENS == 128 && quarters == 4) run<TOKENS < 128 ? 32 : 128>(weights);
            else if (TOKENS >= 96 && quarters == 3) run<TOKENS < 96 ? 32 : 96>(weights);
            else if (TOKENS >= 64 && quarters == 2) run<TOKENS < 64 ? 32 : 64>(weights);
            else run<32>(weights);
        }
        if constexpr (SPLITS > 1) {
            cluster_arrive();
            cluster_wait();
            const int parts = num_parts();
            const int first = parts * item.rank / SPLITS, last = parts * (item.rank + 1) / SPLITS;
            if (has_rows)
                for (int part = first; part < last; part++) add(part, part - first);
            __syncwarp();
            cluster_arrive_relaxed();
            if (has_rows) write(first, last);
            // Nobody's shared memory is gone before it has been read.
            __syncwarp();
            cluster_wait();
        }
    }

    __device__ __forceinline__ int num_parts() const { return (item.count + 15) / 16 * TILES; }

    // Both warpgroups have read all stages, and no copy is under way.
    __device__ __forceinline__ void free_stages() const {
        if constexpr (SPLITS > 1) asm volatile("bar.sync 4, %0;" :: "n"(CONSUMERS) : "memory");
    }

    __device__ __forceinline__ u32 sums_at(int part, int half) const {
        return ring_memory + ((part * 2 + half) * CONSUMERS + threadIdx.x - WARPGROUP) * 16;
    }

    template <int N>
    __device__ __forceinline__ void run(Weights &weights) {
        float acc[TILES][N / 2];
        multiply<N>(acc, weights, ring, ring_memory, item.steps());
        free_stages();
#pragma unroll
        for (int part = 0; part < N / 16 * TILES; part++) {
            f32x4 sums[2];
#pragma unroll
            for (int i = 0; i < 8; i++) sums[i / 4].v[i % 4] = acc[part % TILES][part / TILES * 8 + i];
            if constexpr (SPLITS == 1) {
                stage(sums, part);
            } else {
#pragma unroll
                for (int half = 0; half < 2; half++)
                    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                                 :: "r"(sums_at(part, half)), "f"(sums[half].v[0]), "f"(sums[half].v[1]),
                                    "f"(sums[half].v[2]), "f"(sums[half].v[3]) : "memory");
            }
        }
        if constexpr (SPLITS == 1) write(0, num_parts());
    }

    // The sum of all blocks' sums of a part, in the blocks' order, finished.
    __device__ __forceinline__ void add(int part, int place) const {
        f32x4 sums[2], others[SPLITS][2];
#pragma unroll
        for (int block = 0; block < SPLITS; block++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                others[block][half] = load_from_cluster(address_in(sums_at(part, half), block));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float sum = others[0][i / 4].v[i % 4];
#pragma unroll
            for (int block = 1; block < SPLITS; block++) sum += others[block][i / 4].v[i % 4];
            sums[i / 4].v[i % 4] = sum;
        }
        stage(sums, place);
    }

    // A part to its place among those that this block writes: there a token has eight pieces of eight rows.
    __device__ __forceinline__ void stage(const f32x4 (&sums)[2], int place) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        u32 r[4];  // by eight tokens, and by eight rows
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *v = sums[i / 2].v + i % 2 * 2;
            r[i] = finished(v[0] * alpha, v[1] * alpha, flags & 1);
        }
        const u32 to = staging + place * PART_BYTES + (lane / 16 * 8 + lane % 8) * 128;
        const int piece = warp * 2 + lane / 8 % 2;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(to + (piece ^ lane % 8) * 16), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    }

    // Parts first .. last, which are staged from the first place on.
    __device__ __forceinline__ void write(int first, int last) const {
        const int thread = threadIdx.x % WARPGROUP, token = thread / 8, piece = thread % 8;
        const u32 from = staging + token * 128 + (piece ^ token % 8) * 16;
        if (IS_EARLY) gdc_wait();
        sync_warpgroup<2>(warpgroup);
        for (int part = first; part < last; part++) {
            const int own_token = part / TILES * 16 + token, row = unit * UNIT + part % TILES * 64 + piece * 8;
            if (own_token >= item.count || row >= num_rows) continue;
            u32x4 v;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from + (part - first) * PART_BYTES)
                         : "memory");
            const i64 at = (i64)(item.first_token + own_token) * num_rows + row;
            if (flags & 4) {
                u32x2 bytes;
                bytes.x = to_e4m3(v.x, out_scale) | to_e4m3(v.y, out_scale) << 16;
                bytes.y = to_e4m3(v.z, out_scale) | to_e4m3(v.w, out_scale) << 16;
                *(u64 *)((u8 *)out + at) = bytes.x | (u64)bytes.y << 32;
            } else {
                *(u32x4 *)((u16 *)out + at) = v;
            }
        }
    }
};

// A cluster of SPLITS blocks is an item: up to TOKENS tokens times TILE_ROWS rows of one weight. Each block has its
// share of the columns, and leaves its sums in its shared memory, where the ring was; then each adds all blocks' sums,
// in their order, for its share of the parts, and writes them. The order of a sum depends on SPLITS alone, and with
// SPLITS 1 it is that of the kernel above. Nothing is kept between launches, and no memory but `out` is written.
//
// Rows of x lie x_stride elements apart, a multiple of 8, as is `columns`; num_rows is a multiple of 16, row_bytes of
// 64: there are SPLITS such steps at least. flags: as above. Weights are read while the kernel before this one runs; with
// EARLY x is complete as soon as that one lets this one begin, and all but the writing is done beside it.
extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(3 * WARPGROUP, 1) WGMMA_KERNEL(
    const u16 *x, i64 x_stride, const u8 *codes, const u8 *scales, void *out, float alpha, float out_scale,
    int num_tokens, int num_rows, int columns, int row_bytes, int flags) {
    extern __shared__ u8 memory[];
    u8 *base = memory + (-address_of(memory) & 1023);
    u8 *staging = base + STAGES * STAGE_BYTES;
    Shared &shared = *(Shared *)(staging + 2 * STAGING_BYTES);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init(address_of(&shared.full[i]), 4);   // a warp of the producer each
            init(address_of(&shared.empty[i]), 8);  // a warp of the consumers each
        }
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / WARPGROUP;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const Item item(num_tokens, row_bytes);
        const u32 tile = item.first_unit * (4 * TILES) + threadIdx.x, first = tile * (row_bytes / 64) + item.first_step;
        if (item.first_token == 0 && threadIdx.x < 8 * TILES && tile * 16 < num_rows) {
            fetch_to_l2(codes + first * 1024, item.steps() * 1024);
            fetch_to_l2(scales + first * 128, item.steps() * 128);
        }
        __syncwarp();
        const auto join = [] {
            gdc_wait();
            gdc_launch_dependents();  // which may read what that kernel wrote
        };
        if (!IS_EARLY) join();
        Copies copies(base, shared);
        u32 row_at[TOKENS / 16];  // in pieces
#pragma unroll
        for (int i = 0; i < TOKENS / 16; i++)
            row_at[i] = (u32)(item.first_token + min(copies.first_row + i * 16, item.count - 1)) * (u32)(x_stride / 8);
        copies.run(x, columns, row_at, item.count, item.first_step, item.last_step);
        copies.tell_each(item.steps());
        if (IS_EARLY) join();
        if constexpr (SPLITS > 1) {
            __syncwarp();
            for (int i = 0; i < 2; i++) {
                cluster_arrive_relaxed();
                cluster_wait();
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const Item item(num_tokens, row_bytes);
        Consumer consumer{codes, scales, out, alpha, out_scale, num_rows, row_bytes, flags, item,
                          item.first_unit + warpgroup - 1, warpgroup - 1, address_of(base),
                          address_of(staging) + (warpgroup - 1) * STAGING_BYTES,
                          Ring{0, 0, address_of(shared.full), address_of(shared.empty)}};
        consumer.consume();
    }
}
#endif
