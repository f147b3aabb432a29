#include "optim/option_fields.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <sstream>
#include <tuple>
#include <type_traits>

namespace tessera::optim {
namespace {

std::string text_of(const StateValue& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

template <class T>
StateValue write(const T& value) {
  return value;
}

template <class T>
StateValue write(const std::optional<T>& value) {
  return value ? StateValue(*value) : StateValue();
}

template <class... Numbers>
StateValue write(const std::tuple<Numbers...>& numbers) {
  return std::apply(
      [](const auto&... number) { return StateList{number...}; }, numbers);
}

void read(const StateValue& value, double& to) {
  // Python's lr may be a tensor of one element.
  to = value.is_tensor() && value.tensor().numel() == 1
      ? value.tensor().item<double>()
      : value.to_double();
}

void read(const StateValue& value, bool& to) {
  to = value.to_bool();
}

void read(const StateValue& value, int64_t& to) {
  to = value.to_int();
}

void read(const StateValue& value, std::string& to) {
  to = value.string();
}

template <class... Numbers>
void read(const StateValue& value, std::tuple<Numbers...>& to) {
  const StateList& list = value.list();
  if (list.size() != sizeof...(Numbers)) {
    throw c10::TypeError(
        fmt::format(
            "{} numbers are expected, it has {}",
            sizeof...(Numbers) == 2 ? "two" : "three",
            list.size()),
        nullptr);
  }
  auto next = list.begin();
  std::apply([&](auto&... number) { (read(*next++, number), ...); }, to);
}

template <class T>
void read(const StateValue& value, std::optional<T>& to) {
  if (value.is_none()) {
    to.reset();
  } else {
    read(value, to.emplace());
  }
}

bool is_in(OptionRange range, double value) {
  switch (range) {
    case OptionRange::Any:
      return true;
    case OptionRange::NotNegative:
      return value >= 0;
    case OptionRange::Fraction:
      return value >= 0 && value < 1;
  }
  return false;
}

const char* words_for(OptionRange range) {
  return range == OptionRange::Fraction ? "0 or more and below 1" : "0 or more";
}

std::optional<std::string> objection_to(const OptionField& field) {
  if (const auto* number = std::get_if<double*>(&field.slot)) {
    if (!is_in(field.range, **number)) {
      return fmt::format(
          "{} is {}, must be {}.", field.key, **number, words_for(field.range));
    }
  }
  if (const auto* betas = std::get_if<Betas*>(&field.slot)) {
    const auto [first, second] = **betas;
    if (!is_in(field.range, first) || !is_in(field.range, second)) {
      return fmt::format(
          "{} are {} and {}, must be {}.",
          field.key,
          first,
          second,
          words_for(field.range));
    }
  }
  return std::nullopt;
}

} // namespace

void write_fields(const std::vector<OptionField>& fields, StateDict& group) {
  for (const OptionField& field : fields) {
    std::visit(
        [&](const auto& slot) {
          if constexpr (std::is_pointer_v<std::decay_t<decltype(slot)>>) {
            group.set(field.key, write(*slot));
          } else {
            group.set(field.key, slot.value);
          }
        },
        field.slot);
  }
}

void read_fields(
    const std::vector<OptionField>& fields,
    const StateDict& group,
    const ErrorSite& site,
    const std::string& group_name) {
  for (const OptionField& field : fields) {
    const StateValue* value = group.find(field.key);
    if (value == nullptr) {
      continue;
    }
    if (const auto* fixed = std::get_if<OptionField::Fixed>(&field.slot)) {
      if (!(*value == fixed->value)) {
        raise<c10::ValueError>(
            site,
            fmt::format(
                "{}: \"{}\" is {}, it can only be {} here. {}",
                group_name,
                field.key,
                text_of(*value),
                text_of(fixed->value),
                fixed->advice));
      }
      continue;
    }
    try {
      std::visit(
          [&](const auto& slot) {
            if constexpr (std::is_pointer_v<std::decay_t<decltype(slot)>>) {
              read(*value, *slot);
            }
          },
          field.slot);
    } catch (const c10::Error& error) {
      raise<c10::TypeError>(
          site,
          fmt::format(
              "{}: \"{}\" is {}: {}.",
              group_name,
              field.key,
              text_of(*value),
              error.what_without_backtrace()));
    }
    if (field.is_set != nullptr) {
      *field.is_set = true;
    }
  }
}

std::optional<std::string> range_objection(
    const std::vector<OptionField>& fields) {
  for (const OptionField& field : fields) {
    if (auto objection = objection_to(field)) {
      return objection;
    }
  }
  return std::nullopt;
}

OptionField::Fixed not_differentiable() {
  return {false, "Steps record no graph here; load it as False."};
}

OptionField::Fixed not_capturable() {
  return {false, "Only Adam and AdamW have this option; load it as False."};
}

} // namespace tessera::optim
