#include "language_model.h"

#include <unordered_set>

#include "built_in_model.h"
#include "exported_model.h"

namespace gpt {

int64_t count_parameters(const torch::nn::Module& module) {
  std::unordered_set<const c10::TensorImpl*> seen;
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      count += parameter.numel();
    }
  }
  return count;
}

std::unique_ptr<LanguageModel> make_model(
    Settings& settings,
    const Corpus& corpus) {
  if (settings.exported.file.empty()) {
    return std::make_unique<BuiltInModel>(settings, corpus.vocabulary());
  }
  return std::make_unique<ExportedModel>(settings, corpus);
}

} // namespace gpt
