// What a decoding row of a Mamba-2 layer needs between in_proj and out_proj: the convolution's step, the step of the
// state, the gated group norm.
//
// A cluster is a row and a group, a block BLOCK_HEADS of the group's heads, a warp WARP_ROWS of a head's P, a lane four
// of its N. So a warp reads a row of a head's state with one instruction, 512 bytes, and has WARP_ROWS of them under
// way. Each block convolves B and C of its group again, which are small. The group's sum of squares is exchanged
// through the cluster's shared memory: every head's sum goes to every block, which adds them in order of the heads.
//
// No bit depends on the tile: what is summed over lanes is summed in the order 16, 8, 4, 2, 1 apart, whatever WARP_ROWS
// is, and roundings are spelled out, so that none of them is left to how a compiler contracts.
//
// The states, the slots and the weights are read before `gdc_wait`, while in_proj still runs. That needs a proof, since
// an earlier launch wrote the states. A launch starts when all blocks of the one before it have called
// `gdc_launch_dependents` or ended, so when this one runs, every block of every earlier launch has done either. The
// layer's norm, which is launched before in_proj, alone or with the sum of the experts before it, or is a part of it
// (norm_linear.cu), calls it behind its own `gdc_wait` in every block, so it has waited for all that was launched before
// it, which has ended and is visible in the L2 cache. What wrote the states, the step before or a prompt or a copy, was
// launched before that norm. These reads go past the L1 cache, which is only brought up to date by `gdc_wait`. Hence the
// op's contract: the two launches before this one have written neither states nor slots; where the norm is a part of
// in_proj, one would do.
//
// Defined from outside: HEADS, GROUPS, HEAD_DIM, and of the tile BLOCK_HEADS, WARP_ROWS, STREAMS (states are the first
// to leave the L2 cache).

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

constexpr int STATE = 128, WIDTH = 4, LANES = 32;
constexpr int GROUP_HEADS = HEADS / GROUPS, BLOCKS = GROUP_HEADS / BLOCK_HEADS;  // of a group; of a cluster
constexpr int HEAD_WARPS = HEAD_DIM / WARP_ROWS, THREADS = BLOCK_HEADS * HEAD_WARPS * LANES;
// Of an SM, that registers have to do for: half of them hold states.
constexpr int RESIDENT = (WARP_ROWS > 8 ? 512 : 1024) / THREADS;
constexpr int INNER = HEADS * HEAD_DIM, CHANNELS = 2 * STATE + BLOCK_HEADS * HEAD_DIM;  // of all heads; of a block
constexpr int SHARE = 2 * STATE / BLOCKS;  // channels of B and C whose history a block moves on
constexpr int OWN_CHANNELS = (CHANNELS + THREADS - 1) / THREADS;  // of a thread
constexpr int PAIRS = HEAD_DIM / 2, OWN_PAIRS = (PAIRS + LANES - 1) / LANES;  // of columns in the norm; of a lane
static_assert(HEADS % GROUPS == 0 && GROUP_HEADS % BLOCK_HEADS == 0 && HEAD_DIM % WARP_ROWS == 0, "no rest");
static_assert(HEAD_DIM % 2 == 0, "columns are normed in pairs");
static_assert(BLOCKS <= 8 && 2 * STATE % BLOCKS == 0, "a portable cluster");
static_assert(LANES % WARP_ROWS == 0, "a lane keeps one sum");

struct alignas(16) f32x4 { float x, y, z, w; };

#if STREAMS
#define HINT ".L2::cache_hint"
#define POLICY(n) ", %" #n
#else
#define HINT ""
#define POLICY(n) ""
#endif

// Past the L1 cache: another SM wrote what is read, and this block has not waited.
__device__ __forceinline__ f32x4 load_state(const float *p, u64 policy) {
    f32x4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate" HINT ".v4.f32 {%0, %1, %2, %3}, [%4]" POLICY(5) ";"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p), "l"(policy));
    return v;
}

__device__ __forceinline__ void store_state(float *p, f32x4 v, u64 policy) {
    asm volatile("st.global" HINT ".v4.f32 [%0], {%1, %2, %3, %4}" POLICY(5) ";"
                 :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "l"(policy) : "memory");
}

__device__ __forceinline__ u16 load_history(const u16 *p) {
    u16 v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ float to_float(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ u16 to_bf16(float v) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float rounded(float v) { return to_float(to_bf16(v)); }

// Saturating; NaN stays.
__device__ __forceinline__ u16 to_e4m3(float first, float second) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(second), "f"(first));
    return r;
}

// Of two bfloat16.
__device__ __forceinline__ float half_of(u32 pair, int i) { return __uint_as_float(i ? pair & 0xFFFF0000u : pair << 16); }

__device__ __forceinline__ float silu(float v) { return __fmul_rn(v, __fdividef(1.f, __fadd_rn(1.f, __expf(-v)))); }

// As `step_size` in ssd_update.py.
__device__ __forceinline__ float step_size(float x, float low, float high) {
    const float t = __expf(-fabsf(x)), s = __fdividef(t, __fadd_rn(2.f, t)), q = __fmul_rn(s, s);
    float series = 1.f / 15;
#pragma unroll
    for (int n = 13; n >= 1; n -= 2) series = __fmaf_rn(q, series, 1.f / n);
    const float step = __fmaf_rn(__fmul_rn(2.f, s), series, fmaxf(x, 0.f));
    return x != x ? x : fminf(fmaxf(step, low), high);
}

// Releases nothing but what `fence.mbarrier_init` does.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// A value to the same place in the shared memory of a block of the cluster, and its bytes to that block's barrier.
__device__ __forceinline__ void send(u32 to, float value, u32 barrier, u32 block) {
    asm volatile("{\n"
                 ".reg .b32 to, barrier;\n"
                 "mapa.shared::cluster.u32 to, %0, %3;\n"
                 "mapa.shared::cluster.u32 barrier, %2, %3;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [barrier];\n"
                 "}" :: "r"(to), "r"(__float_as_uint(value)), "r"(barrier), "r"(block) : "memory");
}

__device__ __forceinline__ void await(u32 barrier) {
    u32 is_done = 0;
    while (!is_done)
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}" : "=r"(is_done) : "r"(barrier) : "memory");
}

__device__ __forceinline__ float sum_over_lanes(float v, int width) {
#pragma unroll
    for (; width; width /= 2) v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFFu, v, width));
    return v;
}

// Sums over the warp's lanes of WARP_ROWS values, of which 2 N are left; a lane gets that of row lane / (32 / WARP_ROWS).
template <int N = WARP_ROWS / 2>
__device__ __forceinline__ float sums_over_lanes(float (&v)[WARP_ROWS], int lane) {
    if constexpr (N == 0) {
        return sum_over_lanes(v[0], LANES / 2 / WARP_ROWS);
    } else {
        constexpr int APART = LANES * N / WARP_ROWS;
        const bool upper = lane & APART;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float given = upper ? v[i] : v[i + N], kept = upper ? v[i + N] : v[i];
            v[i] = __fadd_rn(kept, __shfl_xor_sync(0xFFFFFFFFu, given, APART));
        }
        return sums_over_lanes<N / 2>(v, lane);
    }
}

// A tap's product is rounded before it is added. tap: the bits of a float.
__device__ __forceinline__ float add_tap(float total, u16 value, u32 tap) {
    return __fadd_rn(total, rounded(__fmul_rn(to_float(value), __uint_as_float(tap))));
}

// Where in xBC a block's channel lies: B and C of its group, then x of its heads.
__device__ __forceinline__ int channel_of(int c, int group, int first_head) {
    return c < STATE       ? INNER + group * STATE + c
           : c < 2 * STATE ? INNER + (GROUPS - 1 + group) * STATE + c
                           : first_head * HEAD_DIM + c - 2 * STATE;
}

// z, xBC, dt: a row of each is *_stride elements behind the one before. quantises: out is e4m3, divided by out_scale.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, RESIDENT) mamba2_update_kernel(
    const u16 *z, const u16 *xBC, const u16 *dt, i64 z_stride, i64 xBC_stride, i64 dt_stride, const u16 *conv_weight,
    const u16 *conv_bias, u16 *conv_state, i64 conv_stride, const float *A, const float *D, const float *dt_bias,
    float *ssm_state, i64 ssm_stride, const int *slots, const u16 *norm_weight, void *out, float dt_low, float dt_high,
    float eps, float out_scale, int quantises) {
    __shared__ alignas(16) float bc[2 * STATE], xs[BLOCK_HEADS * HEAD_DIM], ys[BLOCK_HEADS * HEAD_DIM];
    __shared__ alignas(16) float squares[GROUP_HEADS];
    __shared__ alignas(8) u64 arrived;
    const int thread = threadIdx.x, lane = thread % LANES, warp = thread / LANES, block = blockIdx.x % BLOCKS;
    const int group = blockIdx.x / BLOCKS, first_head = group * GROUP_HEADS + block * BLOCK_HEADS;
    const i64 row = blockIdx.y;
    const u32 barrier = shared_address(&arrived);
    if (thread == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(barrier), "r"(GROUP_HEADS * 4) : "memory");
    }
    cluster_arrive();

    // What can be read before in_proj has ended.
    const i64 slot = load_early(slots + row);
    if (slot < 0) {  // so for the whole cluster
        gdc_wait();
        gdc_launch_dependents();
#pragma unroll 1
        for (int i = thread; i < BLOCK_HEADS * PAIRS; i += THREADS) {
            const i64 at = (row * HEADS + first_head) * PAIRS + i;
            if (quantises) ((u16 *)out)[at] = 0;
            else ((u32 *)out)[at] = 0;
        }
        return;
    }
    u64 policy = 0;
#if STREAMS
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    const int own_head = warp / HEAD_WARPS, own_row = warp % HEAD_WARPS * WARP_ROWS, head = first_head + own_head;
    float *state_at = ssm_state + slot * ssm_stride + ((i64)head * HEAD_DIM + own_row) * STATE + lane * 4;
    f32x4 state[WARP_ROWS];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) state[i] = load_state(state_at + i * STATE, policy);

    u16 *history_at = conv_state + slot * conv_stride;
    u32 kept[OWN_CHANNELS], last_tap[OWN_CHANNELS];  // the inputs that stay in the history
    float total[OWN_CHANNELS];
#pragma unroll
    for (int k = 0; k < OWN_CHANNELS; k++) {
        const int c = k * THREADS + thread;
        if (c >= CHANNELS) continue;
        const int channel = channel_of(c, group, first_head);
        u16 window[WIDTH - 1];
#pragma unroll
        for (int t = 0; t < WIDTH - 1; t++) window[t] = load_history(history_at + channel * (WIDTH - 1) + t);
        const uint2 taps = *(const uint2 *)(conv_weight + channel * WIDTH);
        total[k] = conv_bias != nullptr ? to_float(conv_bias[channel]) : 0.f;
        total[k] = add_tap(total[k], window[0], taps.x << 16);
        total[k] = add_tap(total[k], window[1], taps.x & 0xFFFF0000u);
        total[k] = add_tap(total[k], window[2], taps.y << 16);
        last_tap[k] = taps.y & 0xFFFF0000u;
        kept[k] = window[1] | (u32)window[2] << 16;
    }
    const float parameter = (lane == 0 ? A : lane == 1 ? D : dt_bias)[head];  // one register for the three
    const auto of_lane = [&](int which) { return __shfl_sync(0xFFFFFFFFu, parameter, which); };
    const int norm_head = first_head + warp;  // of the warps that have one to norm
    const bool norms = warp < BLOCK_HEADS;
    u32 norm[OWN_PAIRS], gate[OWN_PAIRS];
#pragma unroll
    for (int j = 0; j < OWN_PAIRS; j++) {
        const int pair = lane + j * LANES;
        if (norms && pair < PAIRS) norm[j] = ((const u32 *)norm_weight)[norm_head * PAIRS + pair];
    }

    gdc_wait();
    gdc_launch_dependents();
    u16 newest[OWN_CHANNELS];
#pragma unroll
    for (int k = 0; k < OWN_CHANNELS; k++) {
        const int c = k * THREADS + thread;
        if (c < CHANNELS) newest[k] = xBC[row * xBC_stride + channel_of(c, group, first_head)];
    }
#pragma unroll
    for (int j = 0; j < OWN_PAIRS; j++) {
        const int pair = lane + j * LANES;
        if (norms && pair < PAIRS) gate[j] = ((const u32 *)(z + row * z_stride))[norm_head * PAIRS + pair];
    }
    const float step = step_size(__fadd_rn(to_float(dt[row * dt_stride + head]), of_lane(2)), dt_low, dt_high);
    const auto move_on = [&](int k, int c) {
        u16 *at = history_at + channel_of(c, group, first_head) * (WIDTH - 1);
        at[0] = (u16)kept[k];
        at[1] = (u16)(kept[k] >> 16);
        at[2] = newest[k];
    };
#pragma unroll
    for (int k = 0; k < OWN_CHANNELS; k++) {
        const int c = k * THREADS + thread;
        if (c >= CHANNELS) continue;
        const float value = rounded(silu(add_tap(total[k], newest[k], last_tap[k])));
        if (c < 2 * STATE) {
            bc[c] = value;
        } else {
            xs[c - 2 * STATE] = value;
            move_on(k, c);  // no other block reads it
        }
    }
    __syncthreads();

    const float decay = __expf(__fmul_rn(of_lane(0), step));
    const f32x4 B = *(const f32x4 *)(bc + lane * 4), C = *(const f32x4 *)(bc + STATE + lane * 4);
    const f32x4 added = {__fmul_rn(B.x, step), __fmul_rn(B.y, step), __fmul_rn(B.z, step), __fmul_rn(B.w, step)};
    const float *x = xs + own_head * HEAD_DIM + own_row;
    float sums[WARP_ROWS];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const float own_x = x[i];
        f32x4 &s = state[i];
        s.x = __fmaf_rn(s.x, decay, __fmul_rn(own_x, added.x));
        s.y = __fmaf_rn(s.y, decay, __fmul_rn(own_x, added.y));
        s.z = __fmaf_rn(s.z, decay, __fmul_rn(own_x, added.z));
        s.w = __fmaf_rn(s.w, decay, __fmul_rn(own_x, added.w));
        store_state(state_at + i * STATE, s, policy);
        sums[i] = __fmaf_rn(s.w, C.w, __fmaf_rn(s.z, C.z, __fmaf_rn(s.y, C.y, __fmul_rn(s.x, C.x))));
    }
    const float sum = sums_over_lanes(sums, lane);
    constexpr int SAME = LANES / WARP_ROWS;  // lanes with the same row
    const float y = rounded(__fmaf_rn(x[lane / SAME], of_lane(1), sum));
    if (lane % SAME == 0) ys[own_head * HEAD_DIM + own_row + lane / SAME] = y;
    __syncthreads();

    float gated[OWN_PAIRS][2];
    if (norms) {
        float square = 0.f;
#pragma unroll
        for (int j = 0; j < OWN_PAIRS; j++) {
            const int pair = lane + j * LANES;
            if (pair >= PAIRS) continue;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                gated[j][i] = __fmul_rn(silu(half_of(gate[j], i)), ys[warp * HEAD_DIM + pair * 2 + i]);
                square = __fmaf_rn(gated[j][i], gated[j][i], square);
            }
        }
        square = sum_over_lanes(square, 16);
        cluster_wait();  // all blocks have begun, and their barriers are ready
        if (lane < BLOCKS) send(shared_address(squares + block * BLOCK_HEADS + warp), square, barrier, lane);
    }
    await(barrier);  // in every block, so that it is still there when its sums arrive
    // The sums of a block come when it has read all of its histories.
#pragma unroll
    for (int k = 0; k < OWN_CHANNELS; k++) {
        const int c = k * THREADS + thread;
        if (c < 2 * STATE && c / SHARE == block) move_on(k, c);
    }
    if (norms) {
        float total = 0.f;
#pragma unroll
        for (int h = 0; h < GROUP_HEADS; h++) total = __fadd_rn(total, squares[h]);
        const float scale = rsqrtf(__fadd_rn(__fmul_rn(total, 1.f / (GROUP_HEADS * HEAD_DIM)), eps));
#pragma unroll
        for (int j = 0; j < OWN_PAIRS; j++) {
            const int pair = lane + j * LANES;
            if (pair >= PAIRS) continue;
            float value[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                value[i] = rounded(__fmul_rn(rounded(__fmul_rn(gated[j][i], scale)), half_of(norm[j], i)));
            const i64 at = (row * HEADS + norm_head) * PAIRS + pair;
            if (quantises) ((u16 *)out)[at] = to_e4m3(__fdiv_rn(value[0], out_scale), __fdiv_rn(value[1], out_scale));
            else ((u32 *)out)[at] = to_bf16(value[0]) | (u32)to_bf16(value[1]) << 16;
        }
    }
}
