#include "checkpoint/tools/checkpoint_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <variant>

#include "checkpoint/disk/file_error.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/format_error.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kLongestValue = 80;

struct Unit {
  const char* name;
  double bytes;
};
constexpr std::array kUnits{
    Unit{"TB", 1e12},
    Unit{"GB", 1e9},
    Unit{"MB", 1e6},
    Unit{"kB", 1e3}};

// Writes values until the text is long enough.
class Writer {
 public:
  std::string take(const format::Value& value) {
    write(value);
    if (text_.size() > kLongestValue) {
      // Does not cut in the middle of a multi-byte character.
      size_t end = kLongestValue - 3;
      while (end > 0 && (text_[end] & 0xc0) == 0x80) {
        --end;
      }
      text_.resize(end);
      text_ += "...";
    }
    return std::move(text_);
  }

  void operator()(const format::None&) {
    text_ += "None";
  }
  void operator()(bool value) {
    text_ += value ? "True" : "False";
  }
  void operator()(int64_t value) {
    text_ += std::to_string(value);
  }
  void operator()(double value) {
    std::array<char, 32> buffer;
    const auto end =
        std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
    text_.append(buffer.data(), end);
    if (std::isfinite(value) &&
        text_.find_first_of(".e", text_.size() - (end - buffer.data())) ==
            std::string::npos) {
      text_ += ".0";
    }
  }
  void operator()(const std::string& value) {
    text_ += format::in_quotes(value);
  }
  void operator()(const format::Bytes& value) {
    text_ += "<" + count_text(value.data.size(), "byte") + ">";
  }
  void operator()(const format::Complex& value) {
    text_ += "(";
    (*this)(value.real);
    text_ += value.imag < 0 ? "" : "+";
    (*this)(value.imag);
    text_ += "j)";
  }
  void operator()(const format::List& value) {
    items("[", value.items, "]");
  }
  void operator()(const format::Tuple& value) {
    items("(", value.items, ")");
  }
  void operator()(const format::Set& value) {
    items("{", value.items, "}");
  }
  void operator()(const format::Dict& value) {
    text_ += "{";
    for (const auto& [key, item] : value.items) {
      if (is_full()) {
        break;
      }
      text_ += text_.back() == '{' ? "" : ", ";
      write(key);
      text_ += ": ";
      write(item);
    }
    text_ += "}";
  }
  void operator()(const format::Size& value) {
    text_ += "torch.Size(" + sizes_text(value.dims) + ")";
  }
  void operator()(format::DType value) {
    text_ += "torch." + std::string(format::info(value).torch_name);
  }
  void operator()(const format::Device& value) {
    text_ += "device(" + format::in_quotes(value.name) + ")";
  }
  void operator()(const format::Layout& value) {
    text_ += value.name;
  }
  void operator()(format::MemoryFormat) {
    text_ += "<memory format>";
  }
  void operator()(const format::Path& value) {
    text_ += "Path(" + format::in_quotes(value.name) + ")";
  }
  void operator()(const format::Box<format::Storage>&) {
    text_ += "<storage>";
  }
  void operator()(const format::Box<format::Tensor>& value) {
    text_ += "<tensor " + sizes_text(value->sizes) + ">";
  }
  void operator()(const format::Box<format::Object>&) {
    text_ += "<object>";
  }

 private:
  bool is_full() const {
    return text_.size() > kLongestValue;
  }

  void write(const format::Value& value) {
    if (!is_full()) {
      std::visit(*this, value.is);
    }
  }

  void items(
      const char* begin,
      const std::vector<format::Value>& values,
      const char* end) {
    text_ += begin;
    for (size_t i = 0; i < values.size() && !is_full(); ++i) {
      text_ += i > 0 ? ", " : "";
      write(values[i]);
    }
    text_ += end;
  }

  std::string text_;
};

} // namespace

std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + "]";
}

std::string value_text(const format::Value& value) {
  return Writer().take(value);
}

std::string key_text(const format::DcpPath::Key& key) {
  const auto* text = std::get_if<std::string>(&key);
  return text ? *text : std::to_string(std::get<int64_t>(key));
}

uint64_t parse_bytes(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  std::string unit(parsed.ptr, end);
  std::erase(unit, ' ');
  if (parsed.ec == std::errc() && number > 0) {
    if (unit.empty() || unit == "B") {
      return static_cast<uint64_t>(number);
    }
    std::transform(unit.begin(), unit.end(), unit.begin(), [](char c) {
      return static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    });
    for (const auto& known : kUnits) {
      const std::string letter(
          1, std::string(known.name) == "kB" ? 'K' : known.name[0]);
      const bool is_decimal = unit == letter || unit == letter + "B";
      const bool is_binary = unit == letter + "IB";
      if (is_decimal || is_binary) {
        const double power = std::round(std::log10(known.bytes) / 3);
        return static_cast<uint64_t>(
            number * (is_binary ? std::pow(1024, power) : known.bytes));
      }
    }
  }
  throw FileError(
      format::in_quotes(text) +
      " is not a size. Write it like 5GB, 200MB or 1048576.");
}

} // namespace tessera::checkpoint
