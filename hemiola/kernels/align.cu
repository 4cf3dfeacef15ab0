// Pairs grouped by expert. Few by one kernel, in which every block counts all of them, and a warp places those of an
// expert.
//
// Many in two passes: how often a block's pairs take each expert, and then where they belong. Block b has the pairs
// [b per_block, (b + 1) per_block), a warp of it an equal part of them, 32 at a time. Within an expert pairs keep their
// order: those of blocks before, of warps before, and of the same warp before come first.
//
// A token takes TOP_K experts of the routing, and the last NUM_SHARED of all: its pairs are in that order.
//
// Defined from outside: NUM_EXPERTS, TOP_K, NUM_SHARED, TILE (places of a tile).

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr int ROUTED = NUM_EXPERTS - NUM_SHARED, PAIRS = TOP_K + NUM_SHARED;
constexpr int FEW_WARPS = 8, FEW_THREADS = 32 * FEW_WARPS;

typedef unsigned short u16;
struct alignas(16) Eight { u16 v[8]; };

// As load_early, eight numbers.
__device__ __forceinline__ uint4 load_piece(const u16 *p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ int tiles_of(int count) { return (count + TILE - 1) / TILE; }

// Blocks from expert_blocks on bring a row of x each into the order in which products with NVFP4 weights read it (see
// place_of in rows_mma.cu), in whole steps of 128 columns, with zeros behind its end. columns: a multiple of 8. is_early:
// ids and x are complete as soon as the kernel before this one lets this one begin: all is done beside it then.
extern "C" __global__ void __launch_bounds__(FEW_THREADS) align_few_kernel(
    const int *ids, int *sorted_pairs, int *tile_experts, int *num_tiles, int num_ids, const u16 *x, long long x_stride,
    u16 *x_in_place, int columns, int expert_blocks, int is_early) {
    extern __shared__ __align__(16) int memory[];
    __shared__ int counts[NUM_EXPERTS];
    const int thread = threadIdx.x, lane = thread % 32, num_tokens = num_ids / TOP_K;
    const auto join = [] {
        gdc_wait();
        gdc_launch_dependents();
    };
    if (blockIdx.x >= expert_blocks) {
        const int token = blockIdx.x - expert_blocks, width = (columns + 127) / 128 * 128;
        u16 *row = (u16 *)memory;
        for (int c = columns + thread; c < width; c += FEW_THREADS) row[c] = 0;
        if (!is_early) join();
        for (int i = thread; i < columns / 8; i += FEW_THREADS)
            ((uint4 *)row)[i] = load_piece(x + token * x_stride + i * 8);
        __syncthreads();
        for (int i = thread; i < width / 8; i += FEW_THREADS) {
            const int q = i / 4 % 4, t = i % 4;
            const u16 *from = row + i / 16 * 128 + t / 2 * 64 + t % 2 * 4 + q;
            Eight eight;
#pragma unroll
            for (int e = 0; e < 8; e++) eight.v[e] = from[(e / 2 + e % 2 * 4) * 8];
            ((Eight *)(x_in_place + (long long)token * width))[i] = eight;
        }
        if (is_early) join();
        return;
    }
    for (int e = thread; e < NUM_EXPERTS; e += FEW_THREADS) counts[e] = e < ROUTED ? 0 : num_tokens;
    __syncthreads();
    if (!is_early) join();
    for (int at = thread; at < num_ids; at += FEW_THREADS) {
        const int id = load_early(ids + at);
        memory[at] = id;
        atomicAdd(&counts[id], 1);
    }
    __syncthreads();
    const int expert = blockIdx.x * FEW_WARPS + thread / 32;
    if (expert >= NUM_EXPERTS) return;
    int first = 0;
    for (int e = lane; e < expert; e += 32) first += tiles_of(counts[e]);
    for (int i = 16; i > 0; i /= 2) first += __shfl_xor_sync(ALL, first, i);
    const int count = counts[expert], tiles = tiles_of(count);
    int *places = sorted_pairs + first * TILE;
    if (expert == NUM_EXPERTS - 1 && lane == 0) *num_tiles = first + tiles;
    for (int i = lane; i < tiles; i += 32) tile_experts[first + i] = expert;
    for (int i = count + lane; i < tiles * TILE; i += 32) places[i] = num_tokens * PAIRS;
    if (expert >= ROUTED) {
        for (int token = lane; token < num_tokens; token += 32) places[token] = token * PAIRS + TOP_K + expert - ROUTED;
    } else {
        int placed = 0;
#pragma unroll 4
        for (int base = 0; base < num_ids; base += 32) {
            const int at = base + lane;
            const bool is_own = at < num_ids && memory[at] == expert;
            const unsigned own = __ballot_sync(ALL, is_own);
            if (is_own) places[placed + __popc(own & ((1u << lane) - 1))] = at + at / TOP_K * NUM_SHARED;
            placed += __popc(own);
        }
    }
    if (is_early) join();
}

extern "C" __global__ void __launch_bounds__(THREADS) align_count_kernel(
    const int *ids, int *counts, int num_ids, int per_block) {
    __shared__ int own[NUM_EXPERTS];
    const int first = blockIdx.x * per_block, last = min(first + per_block, num_ids);
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) own[e] = 0;
    __syncthreads();
    gdc_wait();
    gdc_launch_dependents();
    for (int at = first + threadIdx.x; at < last; at += THREADS) atomicAdd(&own[ids[at]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < NUM_EXPERTS; e += THREADS) counts[blockIdx.x * NUM_EXPERTS + e] = own[e];
}

extern "C" __global__ void __launch_bounds__(THREADS) align_place_kernel(
    const int *ids, const int *counts, int *sorted_pairs, int *tile_experts, int *num_tiles, int num_ids,
    int per_block) {
    extern __shared__ int places[];  // [WARPS][NUM_EXPERTS]: first how many pairs, then where the next one belongs
    __shared__ int totals[NUM_EXPERTS], before[NUM_EXPERTS], first_tiles[NUM_EXPERTS];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, block = blockIdx.x;
    const int num_tokens = num_ids / TOP_K;
    for (int e = thread; e < NUM_EXPERTS; e += THREADS) {
        totals[e] = e < ROUTED ? 0 : num_tokens;
        before[e] = 0;
    }
    for (int i = thread; i < WARPS * NUM_EXPERTS; i += THREADS) places[i] = 0;
    __syncthreads();
    gdc_wait();
    gdc_launch_dependents();

    constexpr int GROUPS = THREADS > NUM_EXPERTS ? THREADS / NUM_EXPERTS : 1;
    for (int i = thread; i < GROUPS * NUM_EXPERTS; i += THREADS) {
        const int e = i % NUM_EXPERTS;
        int total = 0, earlier = 0;
#pragma unroll 16
        for (int b = i / NUM_EXPERTS; b < gridDim.x; b += GROUPS) {
            const int count = counts[b * NUM_EXPERTS + e];
            total += count;
            if (b < block) earlier += count;
        }
        atomicAdd(&totals[e], total);
        atomicAdd(&before[e], earlier);
    }
    // The ids of the warp, 32 at a time: visit(place, expert, those lanes that have the same expert).
    const int per_warp = per_block / WARPS, first = block * per_block + warp * per_warp;
    int *own = places + warp * NUM_EXPERTS;
    const auto each = [&](auto visit) {
        for (int at = first; at < first + per_warp && at < num_ids; at += 32) {
            const bool is_pair = at + lane < num_ids;
            const unsigned some = __ballot_sync(ALL, is_pair);
            if (is_pair) {
                const int expert = ids[at + lane];
                visit(at + lane, expert, __match_any_sync(some, expert), some);
            }
            __syncwarp();
        }
    };
    each([&](int, int expert, unsigned same, unsigned) {
        if (lane == __ffs(same) - 1) own[expert] += __popc(same);
    });
    __syncthreads();
    if (warp == 0) {
        int tiles = 0;
        for (int base = 0; base < NUM_EXPERTS; base += 32) {
            const int e = base + lane, count = e < NUM_EXPERTS ? tiles_of(totals[e]) : 0;
            int sum = count;
            for (int i = 1; i < 32; i *= 2) {
                const int other = __shfl_up_sync(ALL, sum, i);
                if (lane >= i) sum += other;
            }
            if (e < NUM_EXPERTS) first_tiles[e] = tiles + sum - count;
            tiles += __shfl_sync(ALL, sum, 31);
        }
        if (block == 0 && lane == 0) *num_tiles = tiles;
    }
    __syncthreads();
    for (int e = thread; e < NUM_EXPERTS; e += THREADS) {
        int place = first_tiles[e] * TILE + before[e];
        for (int w = 0; w < WARPS; w++) {
            const int count = places[w * NUM_EXPERTS + e];
            places[w * NUM_EXPERTS + e] = place;
            place += count;
        }
    }
    __syncthreads();
    each([&](int at, int expert, unsigned same, unsigned some) {
        const int place = own[expert] + __popc(same & ((1u << lane) - 1));
        __syncwarp(some);
        if (lane == __ffs(same) - 1) own[expert] += __popc(same);
        sorted_pairs[place] = at + at / TOP_K * NUM_SHARED;
    });
    for (int s = 0; s < NUM_SHARED; s++)
        for (int token = block * THREADS + thread; token < num_tokens; token += gridDim.x * THREADS)
            sorted_pairs[first_tiles[ROUTED + s] * TILE + token] = token * PAIRS + TOP_K + s;
    for (int e = block; e < NUM_EXPERTS; e += gridDim.x) {
        const int tiles = tiles_of(totals[e]);
        for (int i = thread; i < tiles; i += THREADS) tile_experts[first_tiles[e] + i] = e;
        for (int i = totals[e] + thread; i < tiles * TILE; i += THREADS)
            sorted_pairs[first_tiles[e] * TILE + i] = num_tokens * PAIRS;
    }
}
