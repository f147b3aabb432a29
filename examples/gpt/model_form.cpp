#include "model_form.h"

#include <torch/torch.h>

#include <algorithm>

#include "settings.h"

namespace gpt {
namespace {

using Spec = tessera::ExportedSpec;
using Kind = tessera::ExportedValue::Kind;

/// Inputs that are made from the tokens, by the names that they have in
/// Python.
constexpr const char* kMask = "attention_mask";
constexpr const char* kPlaces = "position_ids";
constexpr const char* kLabels = "labels"; // the tokens; the model shifts them
constexpr const char* kTargets = "targets"; // the tokens that follow

bool is_made_from_tokens(const Spec& spec) {
  return spec.name == kMask || spec.name == kPlaces || spec.name == kLabels ||
      spec.name == kTargets;
}

bool is_window(const Spec& spec) {
  return spec.kind == Kind::Tensor && spec.sizes.size() == 2;
}

bool holds_logits(const Spec& spec) {
  return spec.sizes.size() == 3 && c10::isFloatingType(spec.dtype) &&
      spec.sizes[2].is_fixed();
}

bool holds_loss(const Spec& spec) {
  return spec.sizes.empty() && c10::isFloatingType(spec.dtype);
}

std::string words_of(const Spec& spec) {
  std::string text = "\"" + spec.name + "\"";
  if (spec.kind != Kind::Tensor) {
    return text + " (a number)";
  }
  text += " (" + std::string(c10::getDtypeNames(spec.dtype).first) + " [";
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + text_of(spec.sizes[i]);
  }
  return text + "])";
}

std::string words_of(const std::vector<Spec>& specs) {
  std::string text;
  for (const Spec& spec : specs) {
    text += (text.empty() ? "" : ", ") + words_of(spec);
  }
  return text.empty() ? "nothing" : text;
}

void find_inputs(
    const std::vector<Spec>& inputs,
    const std::string& file,
    ModelForm& form) {
  std::vector<Spec> unknown;
  for (const Spec& input : inputs) {
    const bool fits =
        is_window(input) || (input.name == kPlaces && input.sizes.size() == 1);
    if (!is_made_from_tokens(input)) {
      unknown.push_back(input);
    } else if (fits) {
      form.others.push_back(input);
    } else {
      refuse_model(
          file,
          "the input " + words_of(input) +
              " should have the sizes (rows, length). Export the model so, or "
              "without it.");
    }
  }
  if (unknown.size() != 1 || !is_window(unknown.front()) ||
      !c10::isIntegralType(unknown.front().dtype, /*includeBool=*/false)) {
    refuse_model(
        file,
        "the model takes " + words_of(inputs) +
            ". The trainer has tokens for one input of integers, (rows, "
            "length), and makes attention_mask, position_ids, labels and "
            "targets from them. Export the model with such inputs alone.");
  }
  form.ids = unknown.front();
}

/// The one with the first of these names that there is; else the only one.
std::optional<Spec> chosen(
    const std::vector<Spec>& specs,
    const std::vector<std::string>& names) {
  for (const auto& name : names) {
    for (const Spec& spec : specs) {
      if (spec.name == name) {
        return spec;
      }
    }
  }
  return specs.size() == 1 ? std::optional(specs.front()) : std::nullopt;
}

void find_results(
    const std::vector<Spec>& results,
    const std::string& output,
    const std::string& file,
    ModelForm& form) {
  std::vector<Spec> logits;
  std::vector<Spec> losses;
  for (const Spec& result : results) {
    if (result.name.find('[') != std::string::npos) {
      continue; // a result inside of a result
    }
    if (holds_logits(result)) {
      logits.push_back(result);
    } else if (holds_loss(result)) {
      losses.push_back(result);
    }
  }
  form.logits = chosen(logits, {output, "logits"});
  form.own_loss = chosen(losses, {output, "loss"});
  const auto is_meant = [&](const std::optional<Spec>& found) {
    return found && (output.empty() || found->name == output);
  };
  form.trains_on_own_loss =
      is_meant(form.own_loss) && (!output.empty() || logits.empty());
  if (form.trains_on_own_loss || is_meant(form.logits)) {
    return;
  }
  refuse_model(
      file,
      "the model returns " + words_of(results) + ", and " +
          (output.empty() ? "it is not clear which of them are the logits"
                          : "\"" + output + "\" is none of them that fits") +
          ". --model-output names the logits, (rows, length, vocabulary), or "
          "the model's own loss, a single number.");
}

torch::Tensor places(const torch::Tensor& tokens, const Spec& spec) {
  const auto row = torch::arange(tokens.size(1), tokens.options());
  if (spec.sizes.size() == 1) {
    return row;
  }
  const auto& rows = spec.sizes[0];
  return row.expand(
      {rows.is_fixed() ? rows.most : tokens.size(0), tokens.size(1)});
}

} // namespace

ModelForm form_of(
    const tessera::Exported& model,
    const std::string& output,
    const std::string& file) {
  ModelForm form;
  find_inputs(model->inputs(), file, form);
  find_results(model->results(), output, file, form);
  return form;
}

tessera::ExportedArgs ModelForm::arguments(
    const torch::Tensor& tokens,
    const torch::Tensor& targets) const {
  tessera::ExportedArgs args;
  args.set(ids.name, tokens.to(ids.dtype));
  for (const Spec& other : others) {
    const auto value = other.name == kMask ? torch::ones_like(tokens)
        : other.name == kPlaces            ? places(tokens, other)
        : other.name == kLabels            ? tokens
                                           : targets;
    args.set(other.name, value.to(other.dtype));
  }
  return args;
}

const torch::Tensor& part_of(
    const tessera::ExportedValue& result,
    const Spec& spec) {
  if (spec.name.empty()) {
    return result.tensor();
  }
  return result.kind() == Kind::Dict
      ? result[spec.name].tensor()
      : result[static_cast<size_t>(std::stoll(spec.name))].tensor();
}

std::string text_of(const Spec::Size& size) {
  if (size.is_fixed()) {
    return std::to_string(size.least);
  }
  return size.most == Spec::Size().most
      ? std::to_string(size.least) + " or more"
      : std::to_string(size.least) + " to " + std::to_string(size.most);
}

void refuse_model(const std::string& file, const std::string& why) {
  throw UsageError("--model \"" + file + "\": " + why);
}

} // namespace gpt
