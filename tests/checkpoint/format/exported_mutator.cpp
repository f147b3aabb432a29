#include "checkpoint/format/exported_mutator.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>
#include <vector>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/zip_reader.h"

namespace tessera::format {
namespace {

// One change in so many leaves nothing whole on purpose.
constexpr size_t kBlindly = 16;
// The strings of a tree hold JSON, whose strings hold JSON again.
constexpr int kDeepestText = 3;

constexpr auto kOddValues = std::to_array<std::string_view>(
    {"null",
     "true",
     "false",
     "0",
     "1",
     "-1",
     "2",
     "3",
     "7",
     "12",
     "256",
     "-9223372036854775808",
     "9223372036854775807",
     "18446744073709551615",
     "4611686018427387904",
     "0.5",
     "1e308",
     "[]",
     "{}",
     "\"\"",
     "\"NaN\"",
     "\"-Infinity\""});

std::string_view cut(std::string_view text, size_t begin, size_t end) {
  return text.substr(begin, end - begin);
}

std::string_view cut(std::string_view text, const JsonSpan& value) {
  return cut(text, value.begin, value.end);
}

std::string replace(
    std::string_view text,
    size_t begin,
    size_t end,
    std::string_view by) {
  std::string changed;
  changed.reserve(text.size() - (end - begin) + by.size());
  changed += text.substr(0, begin);
  changed += by;
  changed += text.substr(end);
  return changed;
}

// With the name, if it has one.
size_t begin_of(const JsonSpan& value) {
  return value.has_name() ? value.name_begin : value.begin;
}

// The value and one of the commas beside it.
std::string remove(std::string_view text, const JsonSpan& value) {
  size_t begin = begin_of(value);
  size_t end = value.end;
  if (begin > 0 && text[begin - 1] == ',') {
    --begin;
  } else if (end < text.size() && text[end] == ',') {
    ++end;
  }
  return replace(text, begin, end, "");
}

std::string replace_everywhere(
    std::string_view text,
    const std::vector<JsonSpan>& values,
    std::string_view from,
    std::string_view to) {
  std::string changed;
  size_t done = 0;
  for (const auto& value : values) {
    if (value.is_scalar() && cut(text, value) == from) {
      changed += cut(text, done, value.begin);
      changed += to;
      done = value.end;
    }
  }
  return changed += text.substr(done);
}

// A copy of the donor before the value.
std::string insert_before(
    std::string_view text,
    const JsonSpan& value,
    std::string_view other,
    const JsonSpan& donor) {
  const size_t place = begin_of(value);
  std::string copy(cut(other, begin_of(donor), donor.end));
  return replace(text, place, place, copy += ',');
}

// The first value from `from` on, around the end if need be, that is wanted;
// `from` if none is.
template <class IsWanted>
size_t find_from(
    const std::vector<JsonSpan>& values,
    size_t from,
    const IsWanted& is_wanted) {
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t at = (from + i) % values.size();
    if (is_wanted(values[at])) {
      return at;
    }
  }
  return from;
}

// Of strings that the exporter writes: it escapes these two and, in JSON in
// strings, nothing else.
std::string unescaped(std::string_view inner) {
  std::string plain;
  for (size_t i = 0; i < inner.size(); ++i) {
    i += inner[i] == '\\' && i + 1 < inner.size();
    plain += inner[i];
  }
  return plain;
}

std::string escaped(std::string_view plain) {
  std::string inner;
  for (const char c : plain) {
    if (c == '"' || c == '\\') {
      inner += '\\';
    }
    inner += c;
  }
  return inner;
}

bool may_be_json(std::string_view text) {
  return !text.empty() && (text[0] == '{' || text[0] == '[');
}

ZipArchive::Entry entry_of(std::string_view bytes, const ZipEntry& entry) {
  ZipArchive::Entry copy;
  copy.name = entry.name;
  copy.local_name = entry.name;
  copy.data = bytes.substr(entry.offset, entry.size);
  return copy;
}

std::vector<ZipArchive::Entry> entries_of(std::string_view bytes) {
  std::vector<ZipArchive::Entry> entries;
  try {
    for (const auto& entry : read_zip(as_bytes(bytes))) {
      entries.push_back(entry_of(bytes, entry));
    }
  } catch (const FormatError&) {
    return {}; // no archive: to be changed blindly
  }
  return entries;
}

} // namespace

ExportedMutator::ExportedMutator(uint32_t seed, ChangeBytes change_bytes)
    : state_(seed), change_bytes_(std::move(change_bytes)) {}

// PCG: https://www.pcg-random.org, XSH RR without a stream, of 32 bits.
uint32_t ExportedMutator::below(size_t limit) {
  state_ = state_ * 747796405U + 2891336453U;
  const uint32_t word =
      ((state_ >> ((state_ >> 28) + 4)) ^ state_) * 277803737U;
  return ((word >> 22) ^ word) % static_cast<uint32_t>(limit);
}

std::string ExportedMutator::change_blindly(std::string_view bytes) const {
  return change_bytes_(std::string(bytes), max_size_);
}

std::string ExportedMutator::change(std::string_view bytes, size_t max_size) {
  return cross(bytes, bytes, max_size);
}

std::string ExportedMutator::cross(
    std::string_view bytes,
    std::string_view other,
    size_t max_size) {
  max_size_ = max_size;
  std::string changed;
  if (below(kBlindly) > 0) {
    changed = may_be_json(bytes) ? change_json(bytes, other)
                                 : change_archive(bytes, other);
  }
  const bool is_good = !changed.empty() && changed.size() <= max_size;
  return is_good ? changed : change_blindly(bytes);
}

std::string ExportedMutator::change_archive(
    std::string_view bytes,
    std::string_view other) {
  ZipArchive archive{.entries = entries_of(bytes)};
  auto& entries = archive.entries;
  if (entries.empty()) {
    return "";
  }
  const auto donors = entries_of(other);
  const size_t chosen = below(entries.size());
  auto& entry = entries[chosen];
  switch (below(24)) {
    case 0:
      entries.erase(entries.begin() + static_cast<int64_t>(chosen));
      break;
    case 1:
      entry.name = entries[below(entries.size())].name;
      entry.name += below(2) == 0 ? "" : "0";
      entry.local_name = entry.name;
      break;
    case 2:
      entry.name = entry.local_name = change_blindly(entry.name);
      break;
    case 3:
      entry.data = change_blindly(entry.data);
      break;
    case 4:
      entry.wide = true;
      archive.zip64 = below(2) == 0;
      break;
    case 5:
      entry.grow = static_cast<int64_t>(below(7)) - 3;
      entry.move = static_cast<int64_t>(below(7)) - 3;
      break;
    case 6:
      if (!donors.empty()) {
        entries.push_back(donors[below(donors.size())]);
      }
      break;
    default:
      change_json_entry(&entries, chosen, donors);
  }
  return archive.bytes();
}

// Of the entries from `from` on, the first that holds JSON.
void ExportedMutator::change_json_entry(
    Entries* entries,
    size_t from,
    const Entries& donors) {
  for (size_t i = 0; i < entries->size(); ++i) {
    auto& data = (*entries)[(from + i) % entries->size()].data;
    if (may_be_json(data)) {
      const auto* donor =
          donors.empty() ? nullptr : &donors[below(donors.size())];
      const bool has_json = donor && may_be_json(donor->data);
      data = change_json(data, has_json ? donor->data : data);
      return;
    }
  }
}

std::string ExportedMutator::change_json(
    std::string_view text,
    std::string_view other) {
  const auto values = find_json_values(text);
  const auto others = find_json_values(other);
  if (values.empty() || others.empty()) {
    return change_blindly(text);
  }
  const size_t chosen = below(values.size());
  const size_t drawn = below(others.size());
  const JsonSpan& value = values[chosen];
  const JsonSpan& donor = others[drawn];
  const auto put = [&](const JsonSpan& by) {
    return replace(text, value.begin, value.end, cut(other, by));
  };
  const auto is_scalar = [](const auto& any) { return any.is_scalar(); };
  switch (below(10)) {
    case 0:
      return put(donor);
    case 1:
      return put(others[find_from(others, drawn, [&](const auto& any) {
        return any.kind == value.kind && cut(other, any) != cut(text, value);
      })]);
    case 2:
      return remove(text, value);
    case 3:
      return insert_before(
          text,
          value,
          other,
          others[find_from(others, drawn, [&](const auto& any) {
            return any.has_name() == value.has_name();
          })]);
    case 4:
      if (value.has_name() && donor.has_name()) {
        const auto name = cut(other, donor.name_begin, donor.name_end);
        return replace(text, value.name_begin, value.name_end, name);
      }
      return put(donor);
    case 5: { // a name or a number, wherever it stands
      const auto from = cut(text, values[find_from(values, chosen, is_scalar)]);
      const auto to = cut(other, others[find_from(others, drawn, is_scalar)]);
      return replace_everywhere(text, values, from, to);
    }
    default:
      return change_scalar(text, values[find_from(values, chosen, is_scalar)]);
  }
}

std::string ExportedMutator::change_scalar(
    std::string_view text,
    const JsonSpan& value) {
  const auto old = cut(text, value);
  if (value.kind == '"' && below(8) > 0) {
    const auto inner = old.substr(1, old.size() - 2);
    return replace(
        text, value.begin, value.end, '"' + change_text(inner) + '"');
  }
  int64_t number = 0;
  const auto [stop, error] =
      std::from_chars(old.data(), old.data() + old.size(), number);
  if (error == std::errc() && number > -(int64_t{1} << 62) &&
      number < int64_t{1} << 62 && below(2) == 0) {
    number += static_cast<int64_t>(below(5)) - 2;
    return replace(text, value.begin, value.end, std::to_string(number));
  }
  return replace(
      text, value.begin, value.end, kOddValues[below(kOddValues.size())]);
}

std::string ExportedMutator::change_text(std::string_view inner) {
  const std::string plain = unescaped(inner);
  if (may_be_json(plain) && depth_ < kDeepestText) {
    ++depth_;
    const std::string changed = change_json(plain, plain);
    --depth_;
    return escaped(changed);
  }
  std::string changed = change_blindly(plain);
  // What a string of JSON may not have.
  std::erase_if(changed, [](unsigned char c) { return c < 32 || c > 126; });
  return escaped(changed);
}

} // namespace tessera::format
