#include "report/page.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "report/error.h"
#include "report/page_files.h"

namespace tessera::report {
namespace {

// JSON inside a script element: without '<' nothing in it can end the element
// or begin a comment. Outside strings JSON has no '<'.
std::string safe_in_html(const std::string& text) {
  std::string safe;
  safe.reserve(text.size());
  for (const char c : text) {
    if (c == '<') {
      safe += "\\u003c";
    } else if (c == '>') {
      safe += "\\u003e";
    } else if (c == '&') {
      safe += "\\u0026";
    } else {
      safe += c;
    }
  }
  return safe;
}

/// Moves the part of `rest` before `mark` to `page`, then appends `filling`.
void fill(
    std::string* page,
    std::string_view* rest,
    std::string_view mark,
    std::string_view filling) {
  const size_t place = rest->find(mark);
  if (place == std::string_view::npos) {
    throw std::logic_error("page.html has no " + std::string(mark));
  }
  *page += rest->substr(0, place);
  *page += filling;
  rest->remove_prefix(place + mark.size());
}

/// A file that is replaced as a whole, or a stream that is written to.
class OutputFile {
 public:
  OutputFile(const std::filesystem::path& path, bool is_stream)
      : path_(path),
        partial_(
            is_stream
                ? ""
                : path.string() + ".partial-" + std::to_string(::getpid())),
        file_(
            is_stream
                ? ::open(path.c_str(), O_WRONLY | O_CLOEXEC)
                : ::open(
                      partial_.c_str(),
                      O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW,
                      0666)) {
    if (file_ < 0) {
      fail();
    }
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() {
    ::close(file_);
    ::unlink(partial_.c_str()); // already renamed if all went well
  }

  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::write(file_, bytes.data(), bytes.size());
      if (count < 0 && errno != EINTR) {
        fail();
      }
      bytes.remove_prefix(count < 0 ? 0 : count);
    }
  }

  void publish() {
    if (!partial_.empty() &&
        (::fsync(file_) != 0 ||
         std::rename(partial_.c_str(), path_.c_str()) != 0)) {
      fail();
    }
  }

 private:
  [[noreturn]] void fail() const {
    const std::string why = std::strerror(errno);
    ::unlink(partial_.c_str());
    throw ReportError(
        "\"" + path_.string() + "\" cannot be written: " + why +
        ". Write the page elsewhere, or make this place writable.");
  }

  std::filesystem::path path_;
  std::string partial_;
  int file_;
};

} // namespace

std::string make_page(const Run& run) {
  std::string page;
  std::string_view rest = kPageHtml;
  fill(&page, &rest, "{{page.css}}", kPageCss);
  fill(&page, &rest, "{{data}}", safe_in_html(page_data(run)));
  fill(&page, &rest, "{{page.js}}", kPageJs);
  page += rest;
  return page;
}

void write_page(const Run& run, const std::filesystem::path& path) {
  const std::string page = make_page(run);
  std::error_code unknown; // it does not exist yet
  const auto status = std::filesystem::status(path, unknown);
  const bool is_stream = std::filesystem::exists(status) &&
      !std::filesystem::is_regular_file(status);
  const auto target = std::filesystem::is_symlink(path, unknown)
      ? std::filesystem::weakly_canonical(path)
      : path;
  OutputFile file(target, is_stream);
  file.write(page);
  file.publish();
}

} // namespace tessera::report
