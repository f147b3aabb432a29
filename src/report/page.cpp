#include "report/page.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <string_view>

#include "report/page_files.h"
#include "report/report_error.h"

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
    throw std::logic_error("the page has no " + std::string(mark));
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

/// The page with the scripts that all pages have, then its own.
std::string filled(
    std::string_view html,
    const std::string& data,
    std::initializer_list<std::string_view> own_scripts) {
  std::string page;
  fill(&page, &html, "{{page.css}}", kPageCss);
  fill(&page, &html, "{{data}}", safe_in_html(data));
  fill(&page, &html, "{{script}}", kElementJs);
  for (const std::string_view script :
       {kNumberJs,
        kScaleJs,
        kTipJs,
        kSmoothingJs,
        kCursorJs,
        kChartJs,
        kControlsJs,
        kCurvesJs,
        kSummaryJs}) {
    page += script;
  }
  for (const std::string_view script : own_scripts) {
    page += script;
  }
  page += html;
  return page;
}

void write_whole(const std::string& page, const std::filesystem::path& path) {
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

} // namespace

std::string make_page(const Run& run) {
  return filled(kRunHtml, page_data(run), {kTimelineJs, kListJs, kRunJs});
}

std::string make_comparison(const std::vector<NamedRun>& runs) {
  return filled(kComparisonHtml, comparison_data(runs), {kComparisonJs});
}

void write_page(const Run& run, const std::filesystem::path& path) {
  write_whole(make_page(run), path);
}

void write_comparison(
    const std::vector<NamedRun>& runs,
    const std::filesystem::path& path) {
  write_whole(
      runs.size() == 1 ? make_page(runs.front().run) : make_comparison(runs),
      path);
}

} // namespace tessera::report
