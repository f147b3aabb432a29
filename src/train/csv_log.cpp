#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/train/csv_log.h>

#include <c10/util/Exception.h>

#include <charconv>
#include <cmath>
#include <fstream>
#include <system_error>
#include <utility>

#include "train/append_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

void check_columns(const std::vector<std::string>& columns) {
  if (columns.empty()) {
    raise<c10::ValueError>(
        {.call = "CsvLog"}, "there are no columns. Name at least one.");
  }
  for (const std::string& name : columns) {
    if (name.empty() || name.find_first_of(",\"\r\n") != std::string::npos) {
      raise<c10::ValueError>(
          {.call = "CsvLog"},
          "\"" + name +
              "\" cannot name a column. Use a name without commas, quotes and line ends.");
    }
  }
}

std::string header_of(const std::vector<std::string>& columns) {
  std::string header = "step";
  for (const std::string& name : columns) {
    header += "," + name;
  }
  return header;
}

/// As short as possible with the same bits.
std::string csv_number(double value) {
  if (!std::isfinite(value)) {
    return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  }
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  return {text, end};
}

/// The step of a row; nothing for a line that is no row of ours.
std::optional<int64_t> step_of_row(const std::string& line) {
  int64_t step = 0;
  const char* end = line.data() + line.size();
  const auto [stop, error] = std::from_chars(line.data(), end, step);
  return error == std::errc() && stop != end && *stop == ','
      ? std::optional(step)
      : std::nullopt;
}

struct FoundTable {
  bool has_header = false; // the one that was asked for
  bool has_other_header = false;
  int64_t kept_bytes = 0; // the header, and the rows that stay
};

/// Rows ascend, so those that stay are the beginning of the file: cutting the
/// rest off is one operation, which a kill does not divide.
FoundTable read_table(
    const fs::path& path,
    const std::string& header,
    int64_t resumed_from) {
  FoundTable found;
  std::ifstream in(path, std::ios::binary);
  for (std::string line; std::getline(in, line) && !in.eof();) {
    if (!found.has_header) {
      found.has_header = line == header;
      found.has_other_header = !found.has_header;
      if (found.has_other_header) {
        return found;
      }
    } else if (const auto step = step_of_row(line);
               step && *step > resumed_from) {
      return found;
    }
    found.kept_bytes += static_cast<int64_t>(line.size()) + 1;
  }
  return found; // without a line that has no end
}

/// A table with other columns is somebody's work. False if it cannot be
/// renamed.
bool set_table_aside(const fs::path& path) {
  fs::path aside = path.string() + ".old";
  std::error_code error;
  for (int i = 2; fs::exists(fs::symlink_status(aside, error)); ++i) {
    aside = path.string() + ".old" + std::to_string(i);
  }
  fs::rename(path, aside, error);
  TORCH_WARN(
      "CsvLog: ",
      path.string(),
      " has other columns",
      error ? ", and cannot be renamed (" + error.message() +
              "). Training continues; nothing is written to it."
            : "; it is now " + aside.string());
  return !error;
}

} // namespace

struct CsvLog::Impl {
  Impl(
      const fs::path& path,
      const std::string& header,
      const CsvLogOptions& options) {
    Group group;
    if (options.group()) {
      group = *options.group();
    } else if (is_initialized()) {
      group = world();
    }
    if (group.valid() && group.rank() != 0) {
      return;
    }
    std::error_code ignored; // opening the file will report it
    const bool is_file = fs::is_regular_file(path, ignored);
    FoundTable found;
    if (is_file) {
      found = read_table(path, header, options.resumed_from());
    }
    if (found.has_other_header && !set_table_aside(path)) {
      return;
    }
    file.emplace(path, "CsvLog");
    if (is_file) {
      file->cut(found.kept_bytes);
    }
    if (!found.has_header) {
      file->append(header + "\n");
    }
  }

  size_t num_columns = 0;
  int64_t last_step = 0;
  std::optional<train::AppendFile> file; // on the rank that writes
};

CsvLog::CsvLog(
    const fs::path& path,
    const std::vector<std::string>& columns,
    const CsvLogOptions& options) {
  check_columns(columns);
  impl_ = std::make_unique<Impl>(path, header_of(columns), options);
  impl_->num_columns = columns.size();
  impl_->last_step = options.resumed_from();
}

CsvLog::~CsvLog() = default;

bool CsvLog::is_writing() const {
  return impl_->file && impl_->file->is_open();
}

void CsvLog::row(
    int64_t step,
    const std::vector<std::optional<double>>& values) {
  if (values.size() != impl_->num_columns) {
    raise<c10::ValueError>(
        {.call = "CsvLog::row"},
        "step " + std::to_string(step) + " has " +
            std::to_string(values.size()) + " values for " +
            std::to_string(impl_->num_columns) +
            " columns. Pass one for each, std::nullopt where it is not known.");
  }
  if (step <= impl_->last_step) {
    raise<c10::ValueError>(
        {.call = "CsvLog::row"},
        "step " + std::to_string(step) + " comes after step " +
            std::to_string(impl_->last_step) +
            ". Steps ascend; a run that goes back opens the table again, with resumed_from().");
  }
  impl_->last_step = step;
  if (!impl_->file) {
    return;
  }
  std::string text = std::to_string(step);
  for (const auto& value : values) {
    text += "," + (value ? csv_number(*value) : std::string());
  }
  impl_->file->append(text + "\n");
}

} // namespace tessera
