// What the library warns of in a test.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace tessera::testing {

/// Collects warnings as long as the object lives.
class Warnings : public c10::WarningHandler {
 public:
  Warnings() : before_(c10::WarningUtils::get_warning_handler()) {
    c10::WarningUtils::set_warning_handler(this);
  }
  ~Warnings() override {
    c10::WarningUtils::set_warning_handler(before_);
  }
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;

 private:
  c10::WarningHandler* before_;
};

} // namespace tessera::testing
