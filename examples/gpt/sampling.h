#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "any_tokenizer.h"
#include "model.h"

namespace gpt {

struct SamplingOptions {
  int64_t num_tokens = 0; // to write
  uint64_t seed = 0;
  double temperature = 1.0;
  int64_t top_k = 0; // 0: all tokens
  double top_p = 1.0;
};

/// The probability of each token to be next, from its logits, (vocabulary). Of
/// the `top_k` likeliest tokens the fewest that have `top_p` together remain;
/// at least one does. The others have 0. Of equally likely tokens those with
/// lower numbers remain, so that there are never more than `top_k`.
torch::Tensor next_token_probabilities(
    const torch::Tensor& logits,
    const SamplingOptions& options);

/// What a model writes after `prompt`. The random numbers are its own: training
/// continues as if nothing had been sampled. Sharded models: collective.
std::string continued(
    Gpt& model,
    AnyTokenizer& tokenizer,
    const std::string& prompt,
    const SamplingOptions& options,
    torch::Device device);

} // namespace gpt
