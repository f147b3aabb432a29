// What an exported model takes and returns, as the trainer understands it.
#pragma once

#include <tessera/tessera.h>

#include <optional>
#include <string>
#include <vector>

namespace gpt {

/// The places of tokens, logits and loss among a model's inputs and results.
struct ModelForm {
  using Spec = tessera::ExportedSpec;

  Spec ids; // the input that takes the tokens, (rows, length)
  std::vector<Spec> others; // inputs that are made from the tokens
  std::optional<Spec> logits; // results
  std::optional<Spec> own_loss;
  bool trains_on_own_loss = false;

  /// Arguments for tokens and those that follow them, both (rows, length).
  tessera::ExportedArgs arguments(
      const torch::Tensor& tokens,
      const torch::Tensor& targets) const;

  const Spec::Size& rows() const {
    return ids.sizes[0];
  }
  const Spec::Size& length() const {
    return ids.sizes[1];
  }
};

/// Finds them, with the result that --model-output names, if it names one.
/// Throws UsageError with all inputs or results if it is not clear which are
/// meant; `file` is for messages.
ModelForm form_of(
    const tessera::Exported& model,
    const std::string& output,
    const std::string& file);

/// The part of a result that `spec` describes.
const torch::Tensor& part_of(
    const tessera::ExportedValue& result,
    const tessera::ExportedSpec& spec);

/// "2 to 64", "8", "1 or more".
std::string text_of(const tessera::ExportedSpec::Size& size);

/// Throws UsageError.
[[noreturn]] void refuse_model(const std::string& file, const std::string& why);

} // namespace gpt
