#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "any_tokenizer.h"
#include "language_model.h"

namespace gpt {

struct SamplingOptions {
  int64_t num_tokens = 0; // to write
  int64_t length = 1; // of the window that the model looks at
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

/// The tokens of a prompt. Throws UsageError if the model does not know one of
/// them.
std::vector<int32_t> prompt_tokens(
    const LanguageModel& model,
    AnyTokenizer& tokenizer,
    const std::string& prompt);

/// What a model writes after `prompt`. The random numbers are its own: training
/// continues as if nothing had been sampled. Tokens that the tokenizer does not
/// have are never written. Sharded models: collective.
std::string continued(
    LanguageModel& model,
    AnyTokenizer& tokenizer,
    const std::string& prompt,
    const SamplingOptions& options,
    torch::Device device);

} // namespace gpt
