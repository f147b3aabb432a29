#include "comm/together.h"

#include <tessera/comm/agree.h>

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>

namespace tessera::comm {

void together(
    const std::vector<Group>& groups,
    std::string_view call,
    const std::function<void()>& body) {
  std::exception_ptr own;
  std::optional<std::string> text;
  try {
    body();
  } catch (const c10::Error& error) {
    own = std::current_exception();
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = error.what();
  }
  std::exception_ptr told;
  for (const Group& group : groups) { // all: each has ranks that wait for us
    try {
      fail_together(group, call, text);
    } catch (const c10::Error&) {
      told = told ? told : std::current_exception();
    }
  }
  if (own) {
    std::rethrow_exception(own);
  }
  if (told) {
    std::rethrow_exception(told);
  }
}

} // namespace tessera::comm
