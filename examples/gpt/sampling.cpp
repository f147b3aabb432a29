#include "sampling.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <iterator>
#include <span>

namespace gpt {

torch::Tensor next_token_probabilities(
    const torch::Tensor& logits,
    const SamplingOptions& options) {
  const auto all = torch::softmax(logits / options.temperature, 0);
  const int64_t vocabulary = all.size(0);
  const int64_t most =
      options.top_k > 0 ? std::min(options.top_k, vocabulary) : vocabulary;
  if (most == vocabulary && options.top_p >= 1) {
    return all;
  }
  const auto [sorted, order] =
      torch::sort(all, /*stable=*/true, /*dim=*/0, /*descending=*/true);
  auto kept = sorted.narrow(0, 0, most);
  kept = kept / kept.sum();
  if (options.top_p < 1) {
    // A token remains if those before it do not have enough.
    const auto before = kept.cumsum(0) - kept;
    auto is_enough = before >= options.top_p;
    is_enough[0] = false;
    kept = kept.masked_fill(is_enough, 0);
    kept = kept / kept.sum();
  }
  return torch::zeros_like(all).scatter(0, order.narrow(0, 0, most), kept);
}

std::vector<int32_t> prompt_tokens(
    const LanguageModel& model,
    AnyTokenizer& tokenizer,
    const std::string& prompt) {
  auto tokens = tokenizer.encode(prompt.empty() ? "\n" : prompt);
  for (const int32_t token : tokens) {
    if (token >= model.vocabulary()) {
      throw UsageError(
          "--prompt \"" + prompt + "\" has the token " + std::to_string(token) +
          ", and the model knows those from 0 to " +
          std::to_string(model.vocabulary() - 1) +
          ". Give another --prompt, the --tokenizer that the tokens were made "
          "with, or --sample-tokens 0.");
    }
  }
  return tokens;
}

std::string continued(
    LanguageModel& model,
    AnyTokenizer& tokenizer,
    const std::string& prompt,
    const SamplingOptions& options,
    torch::Device device) {
  const torch::NoGradGuard no_grad;
  model.module()->eval();
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  auto tokens = prompt_tokens(model, tokenizer, prompt);
  const auto num_given = std::ssize(tokens);
  for (int64_t i = 0; i < options.num_tokens; ++i) {
    const auto seen = std::min<int64_t>(std::ssize(tokens), options.length);
    const auto ids =
        torch::from_blob(
            tokens.data() + std::ssize(tokens) - seen, {1, seen}, torch::kInt)
            .to(device, torch::kLong);
    const auto all = model.logits(ids)[0][-1].to(torch::kCPU, torch::kFloat);
    const auto logits =
        all.narrow(0, 0, std::min(all.size(0), tokenizer.vocabulary()));
    const auto next = torch::multinomial(
        next_token_probabilities(logits, options),
        /*num_samples=*/1,
        /*replacement=*/false,
        generator);
    tokens.push_back(static_cast<int32_t>(next.item<int64_t>()));
  }
  model.module()->train();
  return tokenizer.decode(
      std::span(tokens).subspan(static_cast<size_t>(num_given)));
}

} // namespace gpt
