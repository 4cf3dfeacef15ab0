"""Small kernels in CUDA for the tests of hemiola.kernels.cuda."""

# out = a + b, after the kernel before it. SHARED: floats of static shared memory, through which it goes.
ADD = """
extern "C" __global__ void __launch_bounds__(256) add(const float* a, const float* b, float* out, int n) {
    __shared__ float staged[SHARED];
    gdc_wait();
    gdc_launch_dependents();
    int i = blockIdx.x * 256 + threadIdx.x;
    staged[threadIdx.x] = i < n ? a[i] : 0.0f;
    __syncthreads();
    if (i < n) out[i] = staged[threadIdx.x] + b[i];
}
"""

# Every kind of argument, in an order that leaves gaps.
ECHO = """
extern "C" __global__ void __launch_bounds__(1) echo(int i, const void* p, float f, long long l, int j, double* out) {
    out[0] = i;
    out[1] = p == nullptr;
    out[2] = f;
    out[3] = l;
    out[4] = j;
}
"""

# Each block of 256 threads reverses its n ints in dynamic shared memory.
REVERSE = """
extern "C" __global__ void __launch_bounds__(256) reverse(const int* in, int* out, int n) {
    extern __shared__ int staged[];
    gdc_wait();
    gdc_launch_dependents();
    for (int i = threadIdx.x; i < n; i += 256) staged[i] = in[blockIdx.x * n + i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 256) out[blockIdx.x * n + i] = staged[n - 1 - i];
}
"""
