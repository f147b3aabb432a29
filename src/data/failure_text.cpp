#include "data/failure_text.h"

#include <c10/util/Exception.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

namespace tessera::data::detail {
namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

std::string list_of(const std::vector<int64_t>& indices) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(indices.size(), kShown); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(indices[i]);
  }
  return text + (indices.size() > kShown ? ", ..." : "");
}

std::string subject_of(
    const LoaderParts& parts,
    const std::vector<int64_t>& indices,
    int64_t current) {
  if (current < 0) {
    return fmt::format(
        "a batch of \"{}\" cannot be made of samples {}",
        parts.name,
        list_of(indices));
  }
  const std::string sample = parts.describe
      ? parts.describe(current)
      : fmt::format("sample {} of \"{}\"", current, parts.name);
  return sample + " cannot be read";
}

} // namespace

std::string failure_text(
    const LoaderParts& parts,
    const std::vector<int64_t>& indices,
    int64_t current,
    Position position,
    const std::exception_ptr& error) {
  return fmt::format(
      "{} (epoch {}, from sample {} of the epoch on): {}",
      subject_of(parts, indices, current),
      position.epoch,
      position.samples,
      text_of(error));
}

} // namespace tessera::data::detail
