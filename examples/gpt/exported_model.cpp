#include "exported_model.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "evaluation.h"

namespace gpt {
namespace {

using Spec = tessera::ExportedSpec;

/// Repeats the last row and the last column until there are enough.
torch::Tensor filled_up(
    const torch::Tensor& ids,
    const Spec::Size& rows,
    const Spec::Size& length) {
  auto result = ids;
  for (const auto& [dim, least] :
       {std::pair(0, rows.least), std::pair(1, length.least)}) {
    const int64_t missing = least - result.size(dim);
    if (missing > 0) {
      auto sizes = result.sizes().vec();
      sizes[static_cast<size_t>(dim)] = missing;
      const auto last = result.narrow(dim, result.size(dim) - 1, 1);
      result = torch::cat({result, last.expand(sizes)}, dim);
    }
  }
  return result;
}

Precision precision_of(torch::ScalarType dtype) {
  return dtype == torch::kBFloat16 ? Precision::BFloat16
      : dtype == torch::kHalf      ? Precision::Float16
                                   : Precision::Float32;
}

const char* flag_of(Precision precision) {
  switch (precision) {
    case Precision::Float32:
      return "fp32";
    case Precision::BFloat16:
      return "bf16";
    case Precision::Float16:
      return "fp16";
  }
  return "";
}

} // namespace

ExportedModel::ExportedModel(Settings& settings, const Corpus& corpus)
    : file_(settings.exported.file) {
  load(settings);
  check_precision(settings);
  check_modes(settings);
  form_ = form_of(model_, settings.exported.output, file_);
  check_results(settings, corpus);
  check_sizes(settings);
  check_evaluation(settings, corpus);
  model_->train();
}

void ExportedModel::refuse(const std::string& why) const {
  refuse_model(file_, why);
}

/// Weights that the file lacks come from --weights or from a checkpoint.
void ExportedModel::load(const Settings& settings) try {
  const bool has_others = !settings.weights.empty() ||
      settings.mode != Mode::Train || settings.has_checkpoints();
  model_ = tessera::load_exported(
      file_,
      tessera::ExportedOptions()
          .deferred(settings.strategy == Strategy::Fsdp)
          .allow_missing(has_others));
} catch (const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  if (text.find("the file has no values for it") == text.npos) {
    throw;
  }
  refuse(
      "the model was exported without its weights. Give them with --weights, "
      "a safetensors file or a folder of them.");
}

/// Casts inside the program are the export's, so it computes in what it was
/// exported in. What is learned is kept in float32.
void ExportedModel::check_precision(const Settings& settings) {
  std::set<torch::ScalarType> dtypes;
  for (const auto& parameter : model_->parameters()) {
    if (parameter.is_floating_point()) {
      dtypes.insert(parameter.scalar_type());
    }
  }
  if (dtypes.empty()) {
    refuse("the model has no parameters to train.");
  }
  const auto dtype = *dtypes.begin();
  const std::string name(c10::getDtypeNames(dtype).first);
  const bool is_known = dtype == torch::kFloat || dtype == torch::kBFloat16 ||
      dtype == torch::kHalf;
  if (dtypes.size() > 1 || !is_known) {
    std::string names;
    for (const auto each : dtypes) {
      names += (names.empty() ? "" : " and ") +
          std::string(c10::getDtypeNames(each).first);
    }
    refuse(
        "the model has parameters of " + names +
        "; the trainer takes a model in float32, in bfloat16 or in float16.");
  }
  if (precision_of(dtype) != settings.precision) {
    refuse(
        "the model was exported in " + name +
        ", and computes in that, not in "
        "--precision " +
        flag_of(settings.precision) + ". Give --precision " +
        flag_of(precision_of(dtype)) +
        ", or export the model in another "
        "dtype.");
  }
  if (dtype == torch::kFloat) {
    return;
  }
  if (settings.strategy != Strategy::Fsdp) {
    refuse(
        "a model that was exported in " + name +
        " needs --strategy fsdp: "
        "parameters are kept in float32 and gathered in " +
        name + ", and copies of them (--strategy ddp, zero) cannot be both.");
  }
  keep_parameters_in_float();
}

/// Buffers stay as they were exported: nothing gathers them in another dtype,
/// and the program reads them as they are.
void ExportedModel::keep_parameters_in_float() {
  for (auto& parameter : model_->parameters()) {
    parameter.set_data(parameter.to(torch::kFloat));
  }
}

/// A file of torch.export.save() has one mode. Better now than at the first
/// evaluation.
void ExportedModel::check_modes(const Settings& settings) {
  const bool trains = settings.mode == Mode::Train;
  const bool evaluates = !trains || settings.eval_every > 0 ||
      settings.sample_tokens > 0 || settings.sample_every > 0;
  for (const bool is_training : {true, false}) {
    if (is_training ? !trains : !evaluates) {
      continue;
    }
    try {
      model_->train(is_training);
      (void)model_->inputs();
    } catch (const c10::ValueError& error) {
      refuse(
          std::string(error.what_without_backtrace()) +
          (trains && !is_training
               ? " Or train it with --eval-every 0 --sample-tokens 0."
               : ""));
    }
  }
  model_->train(trains);
}

void ExportedModel::check_results(
    const Settings& settings,
    const Corpus& corpus) const {
  const bool samples = settings.mode == Mode::Sample ||
      (settings.mode == Mode::Train && settings.sample_tokens > 0);
  if (!form_.logits && samples) {
    refuse(
        "the model returns a loss and no logits, so it cannot write text. "
        "Give --sample-tokens 0.");
  }
  if (form_.logits && vocabulary() < corpus.vocabulary()) {
    refuse(
        "the model knows " + std::to_string(vocabulary()) +
        " tokens, but the data has " + std::to_string(corpus.vocabulary()) +
        ". Give the model's own tokenizer, --tokenizer, or tokens that were "
        "made with it, --tokens.");
  }
}

void ExportedModel::check_sizes(Settings& settings) const {
  const Spec::Size& length = form_.length();
  if (settings.model.length == 0) {
    settings.choose_length(
        length.most < Spec::Size().most ? length.most : GptConfig().length);
  }
  if (settings.mode == Mode::Sample) {
    return; // which fills up
  }
  if (!length.contains(settings.model.length)) {
    refuse(
        "the model takes windows of " + text_of(length) + " tokens, not of " +
        std::to_string(settings.model.length) + ". Change --length.");
  }
  const Spec::Size& rows = form_.rows();
  const int64_t at_once = settings.rows(tessera::world().size());
  const bool may_fill_up = settings.mode == Mode::Evaluate &&
      form_.logits.has_value() && at_once < rows.least;
  if (!rows.contains(at_once) && !may_fill_up) {
    const int64_t fitting = std::clamp(at_once, rows.least, rows.most);
    refuse(
        "the model takes " + text_of(rows) + " rows at once, not " +
        std::to_string(at_once) + ". Give --micro-batch " +
        std::to_string(fitting) + " and a --batch that is a multiple of " +
        std::to_string(fitting * tessera::world().size()) + ".");
  }
}

/// The model's own loss is the mean of the rows that it gets: none can be
/// filled up. The last windows may be fewer than the ranks take at once.
void ExportedModel::check_evaluation(
    const Settings& settings,
    const Corpus& corpus) const {
  const bool evaluates = settings.mode == Mode::Evaluate ||
      (settings.mode == Mode::Train && settings.eval_every > 0);
  if (form_.logits || !evaluates || !corpus.validation) {
    return;
  }
  const int num_ranks = tessera::world().size();
  const int64_t windows = num_evaluated(*corpus.validation, settings);
  const int64_t fewest = fewest_rows(windows, settings, num_ranks);
  if (form_.rows().contains(fewest)) {
    return;
  }
  const int64_t at_once = settings.rows(num_ranks) * num_ranks;
  refuse(
      "the model gives its own loss of " + text_of(form_.rows()) +
      " rows at once, but of " + std::to_string(windows) +
      " evaluated windows a rank would get " + std::to_string(fewest) +
      " in the end. Give --eval-windows " +
      std::to_string(std::max(windows / at_once, int64_t{1}) * at_once) +
      ", or another multiple of " + std::to_string(at_once) + ".");
}

torch::Tensor ExportedModel::logits(const torch::Tensor& ids) {
  const auto filled = filled_up(ids, form_.rows(), form_.length());
  const auto result = model_->forward(form_.arguments(filled, filled));
  const auto& found = part_of(result, *form_.logits);
  if (found.size(0) != filled.size(0) || found.size(1) != filled.size(1)) {
    refuse(
        "for " + std::to_string(filled.size(1)) + " tokens in " +
        std::to_string(filled.size(0)) + " rows the model returns logits of " +
        "shape " + c10::str(found.sizes()) +
        ". Export it so that it returns logits for every token.");
  }
  return found.narrow(0, 0, ids.size(0)).narrow(1, 0, ids.size(1));
}

torch::Tensor ExportedModel::loss(const tessera::data::TokenBatch& batch) {
  if (form_.logits && !(form_.trains_on_own_loss && model_->is_training())) {
    return LanguageModel::loss(batch);
  }
  const auto result =
      model_->forward(form_.arguments(batch.inputs, batch.targets));
  return part_of(result, *form_.own_loss).to(torch::kFloat);
}

void ExportedModel::recompute_blocks() {
  const auto paths = tessera::repeated_blocks(model_);
  if (paths.empty()) {
    refuse(
        "--recompute computes repeated blocks again, and this model has none.");
  }
  const std::set<std::string> chosen(paths.begin(), paths.end());
  try {
    tessera::apply_activation_checkpointing(
        model_, [&](const torch::nn::Module& module) {
          const auto* block =
              dynamic_cast<const tessera::ExportedModule*>(&module);
          return block != nullptr && chosen.contains(block->path());
        });
  } catch (const c10::Error& error) {
    refuse(
        "--recompute is not possible: " +
        std::string(error.what_without_backtrace()));
  }
}

int64_t ExportedModel::vocabulary() const {
  return form_.logits ? form_.logits->sizes[2].most : 0;
}

std::string ExportedModel::description() const {
  const std::string& name = model_->class_name();
  const auto file = std::filesystem::path(file_).filename().string();
  return name.empty() ? file
                      : name.substr(name.rfind('.') + 1) + " (" + file + ")";
}

} // namespace gpt
