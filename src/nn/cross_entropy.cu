// The middle of linear_cross_entropy for the tokens of a chunk: losses, and the
// gradients of the logits in the place of the logits. See Factors in
// chunked_loss.h for what is computed.
//
// NVRTC compiles this file when a GPU first needs it: no header of CUDA and no
// nvcc. Tests compile it with g++, where cuda_on_host.h stands in for CUDA.
// Before it are defined: BFLOAT16, 0 or 1, for the logits (1) or float (0), and
// THREADS, a power of two.

#if BFLOAT16
using Logit = unsigned short;
__device__ inline float to_float(Logit bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}
/// The nearest one, the even one of two.
__device__ inline Logit from_float(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fc0; // not a number
  }
  return static_cast<Logit>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
__device__ inline float exponential(float value) {
  return __expf(value); // far more exact than the logits
}
#else
using Logit = float;
__device__ inline float to_float(Logit value) {
  return value;
}
__device__ inline Logit from_float(float value) {
  return value;
}
__device__ inline float exponential(float value) {
  return expf(value);
}
#endif

/// A pack stays in registers only if loops over it are unrolled.
#ifdef __CUDACC_RTC__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

/// What a thread reads at once.
constexpr int kPack = 16 / sizeof(Logit);
struct alignas(16) Pack {
  Logit values[kPack];
};

/// exp(x) summed over the x that came, as sum * exp(largest).
struct ExpSum {
  float largest; // finite at first: differences stay numbers
  float sum;

  /// A pack at once, so that the sum is scaled once. NaN stays.
  __device__ void add(const float (&x)[kPack]) {
    float most = largest;
    UNROLL
    for (int i = 0; i < kPack; ++i) {
      most = x[i] > most ? x[i] : most;
    }
    float more = 0;
    UNROLL
    for (int i = 0; i < kPack; ++i) {
      more += exponential(x[i] - most);
    }
    sum = sum * exponential(largest - most) + more;
    largest = most;
  }
  __device__ void add(const ExpSum& other) {
    const float most = other.largest > largest ? other.largest : largest;
    sum = sum * exponential(largest - most) +
        other.sum * exponential(other.largest - most);
    largest = most;
  }
};

/// One block for each token. Rows of `logits` begin `stride` elements apart, at
/// multiples of 16 bytes, and their memory ends at one. Pointers that may be
/// null: bias and class_weight; losses (with loss_...): no losses wanted;
/// of_softmax (with at_target): no gradients wanted; loss_even and even: no
/// smoothing.
#ifdef __CUDACC_RTC__
extern "C"
#endif
__global__ void __launch_bounds__(THREADS) cross_entropy(
    Logit* logits,
    long long stride,
    int classes,
    const float* bias,
    const float* class_weight,
    const long long* targets,
    const float* loss_at_target,
    const float* loss_even,
    float* losses,
    const float* at_target,
    const float* even,
    const float* of_softmax) {
  __shared__ ExpSum exp_sums[THREADS];
  __shared__ float weighted_sums[THREADS];
  __shared__ float weight_sums[THREADS];
  const int me = threadIdx.x;
  const long long row = blockIdx.x;
  Logit* const mine = logits + row * stride;
  if (targets[row] < 0 || targets[row] >= classes) {
    __trap(); // an error of the device, as for LibTorch's loss
  }
  const int target = static_cast<int>(targets[row]);
  const bool smooths_loss = losses != nullptr && loss_even != nullptr;
  const auto logit = [&](Logit value, int j) {
    return to_float(value) + (bias != nullptr ? bias[j] : 0.0f);
  };
  const auto weight = [&](int j) {
    return class_weight != nullptr ? class_weight[j] : 1.0f;
  };

  ExpSum exp_sum{-3.402823466e+38f, 0};
  float weighted_sum = 0;
  float weight_sum = 0;
  for (int first = me * kPack; first < classes; first += THREADS * kPack) {
    const Pack pack = *reinterpret_cast<const Pack*>(mine + first);
    float x[kPack];
    UNROLL
    for (int i = 0; i < kPack; ++i) {
      const int j = first + i;
      x[i] = __uint_as_float(0xff800000u); // minus infinity: adds nothing
      if (j < classes) {
        x[i] = logit(pack.values[i], j);
        if (smooths_loss) {
          weighted_sum += weight(j) * x[i];
          weight_sum += weight(j);
        }
      }
    }
    exp_sum.add(x);
  }
  const float of_target = logit(mine[target], target); // before it is replaced
  exp_sums[me] = exp_sum;
  weighted_sums[me] = weighted_sum;
  weight_sums[me] = weight_sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (me < half) {
      exp_sums[me].add(exp_sums[me + half]);
      weighted_sums[me] += weighted_sums[me + half];
      weight_sums[me] += weight_sums[me + half];
    }
  }
  __syncthreads();
  // Kept apart: their sum would lose what the largest logit has no bits for.
  const float largest = exp_sums[0].largest;
  const float sum = exp_sums[0].sum;

  if (losses != nullptr && me == 0) {
    float loss = -loss_at_target[row] * (of_target - largest - logf(sum));
    if (smooths_loss) {
      loss -= loss_even[row] *
          (weighted_sums[0] - (largest + logf(sum)) * weight_sums[0]);
    }
    losses[row] = loss;
  }
  if (of_softmax == nullptr) {
    return;
  }
  const float inverse = 1 / sum;
  // Read once: after a write to a logit they would be read again.
  const float softmax_factor = of_softmax[row];
  const float target_factor = at_target[row];
  const float even_factor = even != nullptr ? even[row] : 0.0f;
  for (int first = me * kPack; first < classes; first += THREADS * kPack) {
    Pack pack = *reinterpret_cast<const Pack*>(mine + first);
    UNROLL
    for (int i = 0; i < kPack; ++i) {
      const int j = first + i;
      if (j < classes) {
        float gradient = softmax_factor *
            exponential(logit(pack.values[i], j) - largest) * inverse;
        if (j == target) {
          gradient -= target_factor;
        }
        if (even != nullptr) {
          gradient -= even_factor * weight(j);
        }
        pack.values[i] = from_float(gradient);
      }
    }
    *reinterpret_cast<Pack*>(mine + first) = pack;
  }
}
