// What grouped_fp8.cu and grouped_nvfp4.cu share: all pairs of tokens and experts, grouped by expert.
//
// Weights are the tiles of tiles.py or nvfp4.py, a strip 16 rows with all their columns. A tile of up to TOKENS pairs meets
// all strips of its expert. Blocks stay, one a multiprocessor, and take even shares of all strips: a tile's lie side by
// side, tiles one after the other.
//
// Behind wgmma.cuh. Defined from outside: TOKENS (a multiple of 8 up to 32), ROW_STEPS (tiles of a strip).

constexpr int STRIPS = 4, WARPGROUP = 32 * STRIPS, SUMS = TOKENS / 2;  // strips, and a thread's sums, of a warpgroup
constexpr u32 TILE_BYTES = 1024, BLOCK_BYTES = TOKENS * 128;  // x lies in blocks of 128 bytes of each row
static_assert(TOKENS % 8 == 0 && TOKENS <= 32, "a lane of a warp for each");

__device__ __forceinline__ void store_one(u32 at, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(at), "r"(v) : "memory");
}

// What is the same in all lanes, which lets it stay in a uniform register.
__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

// What the kernels are given. x: rows of x_stride elements. sorted_pairs, experts, num_tiles: of tiles of TOKENS pairs; those
// below num_pairs come first. Row p / pairs_per_x of x belongs to pair p. num_rows is a multiple of 16. The last num_shared
// of num_experts are pieces of the shared expert, which each token takes after top_k others. pair_weights: null, or of the
// others; pieces are then written as float32 to `pieces` (tokens, num_shared, num_rows).
// flags: 1 squared ReLU, 4 quantised to e4m3 (out is bytes then), with out_scales[expert]; 8 experts, sorted_pairs and
// num_tiles were written before the kernel before this one, which waited for them.
// x: bfloat16; for e4m3 weights quantised with input_scales[expert], or e4m3 without them.
struct Given {
    const u8 *x;
    i64 x_stride;
    const u8 *codes, *scales;
    const float *alpha;
    const int *sorted_pairs, *experts, *num_tiles;
    const float *pair_weights;
    void *out;
    float *pieces;
    const float *input_scales, *out_scales;
    int num_pairs, pairs_per_x, top_k, num_shared, num_experts, num_rows, columns, flags;

    __device__ __forceinline__ int pairs_per_token() const { return top_k + num_shared; }
    __device__ __forceinline__ bool is_piece(int expert) const {
        return pair_weights != nullptr && expert >= num_experts - num_shared;
    }
};

// Strips of one tile of pairs that a block takes: from `first` on, of all that the expert has.
struct Share {
    int tile, first, count, expert;
};

// A block's shares, one after the other.
struct Shares {
    const int *experts;
    int at, end, strips;

    __device__ __forceinline__ explicit Shares(const Given &given) : experts(given.experts), strips(given.num_rows / 16) {
        const i64 all = (i64)load_early(given.num_tiles) * strips;
        at = (int)(all * blockIdx.x / gridDim.x);
        end = (int)(all * (blockIdx.x + 1) / gridDim.x);
    }

    __device__ __forceinline__ bool next(Share &share) {
        if (at >= end) return false;
        share.tile = at / strips;
        share.first = at - share.tile * strips;
        share.count = min(strips - share.first, end - at);
        share.expert = load_early(experts + share.tile);
        at += share.count;
        return true;
    }
};

// Pairs of a share, and what their sums are multiplied with.
struct Tokens {
    int pairs[TOKENS];
    float factors[TOKENS];

    // By a lane for each.
    __device__ __forceinline__ void set(const Given &given, int lane, int pair, int expert) {
        const bool has_weight = given.pair_weights != nullptr && !given.is_piece(expert) && pair < given.num_pairs;
        pairs[lane] = pair;
        factors[lane] = (given.alpha != nullptr ? given.alpha[expert] : 1.f) *
                        (has_weight ? given.pair_weights[pair - pair / given.pairs_per_token() * given.num_shared] : 1.f);
    }
};

// A lane's pair of the share's tile: num_pairs in a place that is empty.
__device__ __forceinline__ int pair_of(const Given &given, const Share &share, int lane) {
    return lane < TOKENS ? load_early(given.sorted_pairs + share.tile * TOKENS + lane) : given.num_pairs;
}

// By a warp: its sums of a strip, as wgmma has them, finished. count: the tile's pairs.
__device__ __forceinline__ void write(const Given &given, const Share &share, const Tokens &tokens, const float (&acc)[SUMS],
                                      int strip, int count) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, is_odd = g % 2;
    const int first_row = (share.first + strip) * 16, num_rows = given.num_rows, num_pairs = given.num_pairs;
    if (given.is_piece(share.expert)) {
        const int which = share.expert - (given.num_experts - given.num_shared);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const int place = i / 4 * 8 + t * 2 + i % 2, pair = tokens.pairs[place];
            const i64 piece = (i64)(pair / given.pairs_per_token()) * given.num_shared + which;
            if (pair < num_pairs)
                given.pieces[piece * num_rows + first_row + g + i % 4 / 2 * 8] = acc[i] * tokens.factors[place];
        }
        return;
    }
    const bool quantises = given.flags & 4;
    const float code_scale = quantises ? given.out_scales[share.expert] : 1.f, inverse = __frcp_rn(code_scale);
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
        if (n * 8 >= count) break;
        const int place = n * 8 + t * 2;  // the lane's two tokens, of each of its two rows
        const float factors[2] = {tokens.factors[place], tokens.factors[place + 1]};
        // The lane of the row beside, one further or one before, has the same tokens. Each keeps one, of both rows.
        const int pair = tokens.pairs[place + is_odd];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *sums = acc + n * 4 + half * 2;
            const u32 pack = finished(sums[0] * factors[0], sums[1] * factors[1], given.flags & 1);
            const u32 other = __shfl_xor_sync(0xFFFFFFFFu, pack, 4);
            const u32 result = __byte_perm(pack, other, is_odd ? 0x3276 : 0x5410);
            if (pair >= num_pairs) continue;
            const i64 to = (i64)pair * num_rows + first_row + half * 8 + g / 2 * 2;
            if (quantises)
                *(u16 *)((u8 *)given.out + to) = (u16)to_e4m3(result, code_scale, inverse);
            else
                *(u32 *)((u16 *)given.out + to) = result;
        }
    }
}

// By WARPS warps, of which this is `warp`: rows 0 .. count of x to shared memory, as Quarter loads and stores what of a row
// meets a tile. AT_ONCE of them are under way; `open` is called before any is stored. own_row: lane n's is the n-th's.
template <typename Quarter, int WARPS, int AT_ONCE, typename Open>
__device__ __forceinline__ void bring_x(const Given &given, u32 to, int warp, int count, int own_row, i64 row_bytes,
                                        float scale, Open open) {
    const int g = threadIdx.x % 32 / 4, items = (count + 7) / 8 * ROW_STEPS;  // what of eight rows meets a tile
    int first = warp;
    do {
        Quarter quarters[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int item = first + i * WARPS, n = item / ROW_STEPS * 8 + g;
            const u8 *row = given.x + __shfl_sync(0xFFFFFFFFu, own_row, n) * row_bytes;
            if (item < items && n < count) quarters[i].load(row, item % ROW_STEPS, given.columns, scale);
        }
        if (first == warp) open();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int item = first + i * WARPS, n = item / ROW_STEPS * 8 + g;
            if (item < items && n < count) quarters[i].store(to + n * 128, item % ROW_STEPS, g);
        }
        first += WARPS * AT_ONCE;
    } while (first < items);
}
