// The router of a mixture-of-experts layer for few tokens: logits and choice in one kernel. For sm_90 and later.
//
// A cluster of eight blocks takes 8 NT tokens and all experts. Each block multiplies an eighth of the columns, and then
// adds and routes every eighth token: partial sums go straight into the shared memory of the block that adds them, whose
// mbarrier counts their bytes. It adds them in the blocks' order, so that a token's bits depend neither on other tokens
// nor on NT.
//
// Products are mma.m16n8k16 with the gate on the side of 16. Lane (g = lane / 4, t = lane % 4) reads 8 columns of rows g
// and g + 8 and of token g, those from 8 t on of a step's 32. A product sums over its k in any order, as long as both
// operands agree on it: so the first and the last four of them are the lane's part of two products.
//
// For very few tokens, NORM of them, x is what the norm before the router takes: every block norms all of their rows, as
// rms_norm.cu does and with the same bits, since that is less than what a launch costs. It writes what lies in its eighth
// of the columns, and multiplies that.
//
// Behind norm.cuh. Defined from outside: EXPERTS, COLUMNS (a multiple of 8), NT (tiles of 8 tokens), TOP_K (at most 32),
// GROUPS and TAKEN (equal where no groups are chosen), NORMALISE (0 or 1), WARPS; NORM (0: x is normed already; at most
// 8, and NT is 1 then) and RESIDUAL (0 or 1: whether there is one to add before).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr int BLOCKS = 8;  // of a cluster, and tokens of a tile: token n of a tile belongs to block n
constexpr int ALL_STEPS = (COLUMNS + 31) / 32, STEPS = (ALL_STEPS + BLOCKS - 1) / BLOCKS;
constexpr int ROW_TILES = ((EXPERTS + 15) / 16 + WARPS - 1) / WARPS;  // of a warp, 16 experts each
constexpr int CHUNK = STEPS < 12 ? STEPS : 12;  // steps whose weights a warp holds at a time
constexpr int ROWS = ROW_TILES * WARPS * 16;
constexpr int SUMS = 4;  // of a product, so that one need not wait for the one before
constexpr int PER_LANE = (EXPERTS + 31) / 32;
#if NORM
using Norm = rms::BlockRows<NORM, COLUMNS, WARPS, RESIDUAL>;
#endif
static_assert(NORM == 0 || (NORM <= 8 && NT == 1), "all rows are one tile's");
constexpr float DROPPED = -3.0e38f;  // an expert of a group out of the choice: after all others, before those taken

struct alignas(16) u32x4 { u32 x, y, z, w; };

__device__ __forceinline__ u32x4 load_gate(const u16 *p) {
    u32x4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address, in the cluster's shared memory, of what lies at `address` in this block's, in block `rank`.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Two numbers to a block's shared memory; its barrier counts 8 bytes when they are there.
__device__ __forceinline__ void send(u32 address, u32 barrier, float first, float second) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(address), "f"(first), "f"(second), "r"(barrier) : "memory");
}

// One arrival, of the thread that calls this, and `bytes` end the barrier's only phase.
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier) : "memory");
    } while (!done);
}

// Unsigned numbers in the order of floats; a NaN is the largest, as torch sorts it. None is 0.
__device__ __forceinline__ u32 in_order(float v) {
    const u32 bits = __float_as_uint(v);
    return v != v ? 0xFFFFFFFFu : bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

// Groups that are not among the best TAKEN drop out. One warp; choice: of one token's experts; scores: room for a
// number a group.
__device__ __forceinline__ void drop_groups(float *choice, float *scores, int lane) {
    constexpr int SIZE = EXPERTS / GROUPS;
    for (int group = lane; group < GROUPS; group += 32) {
        float best = choice[group * SIZE], second = -__int_as_float(0x7F800000);
        for (int i = 1; i < SIZE; i++) {
            const float v = choice[group * SIZE + i];
            second = fmaxf(second, fminf(best, v));
            best = fmaxf(best, v);
        }
        scores[group] = SIZE > 1 ? best + second : best;
    }
    __syncwarp();
    for (int group = lane; group < GROUPS; group += 32) {
        int before = 0;
        for (int other = 0; other < GROUPS; other++)
            before += scores[other] > scores[group] || (scores[other] == scores[group] && other < group);
        if (before >= TAKEN)
            for (int i = 0; i < SIZE; i++) choice[group * SIZE + i] = DROPPED;
    }
    __syncwarp();
}

// One warp chooses a token's experts: ids and weights, TOP_K each.
__device__ __forceinline__ void choose(const float *choice, const float *scores, int *ids, float *weights, int lane) {
    u32 keys[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = lane + 32 * i;
        keys[i] = expert < EXPERTS ? in_order(choice[expert]) : 0;
    }
    int mine = 0;  // lane k: the k-th choice
#pragma unroll
    for (int place = 0; place < TOP_K; place++) {
        u32 key = keys[0], own = lane;
#pragma unroll
        for (int i = 1; i < PER_LANE; i++)
            if (keys[i] > key) {
                key = keys[i];
                own = lane + 32 * i;
            }
        const u32 best = __reduce_max_sync(0xFFFFFFFFu, key);
        const u32 expert = __reduce_min_sync(0xFFFFFFFFu, key == best ? own : 0xFFFFFFFFu);  // the lowest id of those
        if (lane == place) mine = (int)expert;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (expert == lane + 32 * i) keys[i] = 0;
    }
    float score = lane < TOP_K ? scores[mine] : 0.f;
    if (NORMALISE) {
        float sum = score;
#pragma unroll
        for (int offset = 16; offset; offset /= 2)
            if (offset < TOP_K) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
        score = __fdiv_rn(score, sum + 1e-20f);
    }
    if (lane < TOP_K) {
        ids[lane] = mine;
        weights[lane] = score;
    }
}

// x, and residual: (num_tokens, COLUMNS), a stride's numbers apart. y, sum: (num_tokens, COLUMNS): the normed rows, and
// with RESIDUAL x + residual. gate: (EXPERTS, COLUMNS). bias: (EXPERTS,). logits: (num_tokens,
// EXPERTS). ids, weights: (num_tokens, TOP_K).
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(32 * WARPS, 1)
    router_kernel(const u16 *x, i64 x_stride, const u16 *gate, const float *bias, float *logits, int *ids,
                  float *weights, int num_tokens, const u16 *residual, i64 residual_stride, const u16 *norm_weight,
                  u16 *y, u16 *sum, float eps) {
    __shared__ __align__(16) float parts[BLOCKS][NT][ROWS];  // of 16 experts: 0, 8, 1, 9, ...
    __shared__ float correction[EXPERTS], choice[NT][EXPERTS], scores[NT][EXPERTS], group_scores[NT][GROUPS];
    __shared__ u64 barrier;
#if NORM
    __shared__ Norm::Shared shared;
    __shared__ __align__(16) u16 normed[NORM][STEPS * 32];  // the block's columns
#endif
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int rank = (int)cluster_rank(), first_token = (int)(blockIdx.x / BLOCKS) * (BLOCKS * NT);
    const int own_tokens = min(max((num_tokens - first_token - rank + BLOCKS - 1) / BLOCKS, 0), NT);
    const u32 barrier_at = (u32)__cvta_generic_to_shared(&barrier);
    if (thread == 0) expect(barrier_at, own_tokens * (BLOCKS * ROWS * 4));
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const int first = ALL_STEPS * rank / BLOCKS, count = ALL_STEPS * (rank + 1) / BLOCKS - first;
    const int column = first * 32 + t * 8;  // the lane's, of the block's first step
    // A step may be missing, of blocks with fewer, and so may a lane's columns, of the row's last step.
    const auto is_in = [&](int step) {
        return (step < ALL_STEPS / BLOCKS || step < count) && (COLUMNS % 32 == 0 || column + step * 32 < COLUMNS);
    };
#if NORM
    Norm norm(warp, lane);
    bool owns[Norm::OWN];  // columns that are the block's: those it norms
    rms::Eight norm_weights[Norm::OWN];
#pragma unroll
    for (int i = 0; i < Norm::OWN; i++) {
        norm.place(i);
        owns[i] = norm.has[i] && norm.starts[i] >= first * 32 && norm.starts[i] < (first + count) * 32;
        if (owns[i]) norm_weights[i] = rms::load(norm_weight + norm.starts[i]);
        norm.prefetch(i, x, x_stride, residual, residual_stride);
    }
    const u16 *x_rows[NT] = {normed[min(g, NORM - 1)] + t * 8};
#else
    const u16 *x_rows[NT];
#pragma unroll
    for (int n = 0; n < NT; n++)
        x_rows[n] = x + (i64)min(first_token + n * 8 + g, num_tokens - 1) * x_stride + column;
#endif
    const u32 to = (u32)__cvta_generic_to_shared(&parts[rank][0][0]);
#pragma unroll 1
    for (int m = 0; m < ROW_TILES; m++) {
        const int row = (warp + m * WARPS) * 16 + g;
        const u16 *upper = gate + (i64)min(row, EXPERTS - 1) * COLUMNS + column;
        const u16 *lower = gate + (i64)min(row + 8, EXPERTS - 1) * COLUMNS + column;
        float acc[NT][SUMS][4];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int s = 0; s < SUMS; s++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[n][s][i] = 0.f;
#pragma unroll
        for (int base = 0; base < STEPS; base += CHUNK) {
            u32x4 u[CHUNK], l[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                u[i] = l[i] = {0, 0, 0, 0};
                if (base + i < STEPS && is_in(base + i)) {
                    u[i] = load_gate(upper + (base + i) * 32);
                    l[i] = load_gate(lower + (base + i) * 32);
                }
            }
            if (m == 0 && base == 0) {
#pragma unroll 1
                for (int i = thread; i < EXPERTS; i += 32 * WARPS) correction[i] = bias[i];
                asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all barriers are there, and may count
                gdc_wait();
                gdc_launch_dependents();
#if NORM
                norm.read(x, x_stride, residual, residual_stride, shared);
                __syncthreads();
#pragma unroll
                for (int i = 0; i < Norm::OWN; i++) {
                    if (!owns[i]) continue;
                    const int row = norm.rows[i], start = norm.starts[i];
                    const rms::Eight result = norm.normed(i, norm_weights[i], eps, shared);
                    *(rms::Eight *)(normed[row] + start - first * 32) = result;
                    const i64 at = (i64)row * COLUMNS + start;
                    *(rms::Eight *)(y + at) = result;
                    if (RESIDUAL) *(rms::Eight *)(sum + at) = norm.sums[i];
                }
                __syncthreads();
#endif
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                u32x4 v[CHUNK];
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    v[i] = {0, 0, 0, 0};
                    if (base + i < STEPS && is_in(base + i)) v[i] = *(const u32x4 *)(x_rows[n] + (base + i) * 32);
                }
#pragma unroll
                for (int i = 0; i < CHUNK; i++) {
                    if (base + i >= STEPS) continue;
                    float(&one)[4] = acc[n][(base + i) * 2 % SUMS], (&other)[4] = acc[n][((base + i) * 2 + 1) % SUMS];
                    mma(one, u[i].x, l[i].x, u[i].y, l[i].y, v[i].x, v[i].y);
                    mma(other, u[i].z, l[i].z, u[i].w, l[i].w, v[i].z, v[i].w);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {  // the lane's two tokens, with its two rows of each
                const int owner = 2 * t + i;
                if (first_token + n * 8 + owner >= num_tokens) continue;
                float sums[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float(&c)[SUMS][4] = acc[n];
                    sums[j] = (c[0][2 * j + i] + c[1][2 * j + i]) + (c[2][2 * j + i] + c[3][2 * j + i]);
                }
                send(address_in(to, owner) + (n * ROWS + (warp + m * WARPS) * 16 + 2 * g) * 4,
                     address_in(barrier_at, owner), sums[0], sums[1]);
            }
    }
    if (own_tokens == 0) return;
    __syncthreads();  // for `correction`
    wait_for(barrier_at);
#pragma unroll 1
    for (int i = thread; i < own_tokens * EXPERTS; i += 32 * WARPS) {
        const int n = i / EXPERTS, expert = i % EXPERTS, at = expert / 16 * 16 + expert % 8 * 2 + expert / 8 % 2;
        float sum = parts[0][n][at];
#pragma unroll
        for (int block = 1; block < BLOCKS; block++) sum += parts[block][n][at];
        logits[(i64)(first_token + n * BLOCKS + rank) * EXPERTS + expert] = sum;
        const float score = __fdiv_rn(1.f, 1.f + expf(-sum));
        scores[n][expert] = score;
        choice[n][expert] = score + correction[expert];
    }
    __syncthreads();
#pragma unroll 1
    for (int n = warp; n < own_tokens; n += WARPS) {
        const i64 at = (i64)(first_token + n * BLOCKS + rank) * TOP_K;
        if (TAKEN < GROUPS) drop_groups(choice[n], group_scores[n], lane);
        choose(choice[n], scores[n], ids + at, weights + at, lane);
    }
}
