#include "comm/group/all_or_none.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>

namespace tessera::comm {

void all_or_none(
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
  std::optional<std::string> told;
  try {
    for_each_group(
        groups, [&](const Group& group) { fail_together(group, call, text); });
  } catch (const c10::DistError&) {
    throw; // a peer is gone
  } catch (const c10::Error& error) {
    told = error.what_without_backtrace();
  }
  if (own) {
    std::rethrow_exception(own);
  }
  if (told) {
    raise<c10::ValueError>({}, *told);
  }
}

void for_each_group(
    const std::vector<Group>& groups,
    const std::function<void(const Group&)>& body) {
  std::exception_ptr first;
  for (const Group& group : groups) {
    try {
      body(group);
    } catch (const c10::Error&) {
      first = first ? first : std::current_exception();
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

} // namespace tessera::comm
