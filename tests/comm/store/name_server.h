// A name server inside the test, in place of the C library's functions.
#pragma once

#include <atomic>

namespace tessera::testing {

/// How often somebody asked for the name of an address.
extern std::atomic<int> names_asked_for;
/// How often "later.test" is not known before it is.
extern std::atomic<int> failures_left;

} // namespace tessera::testing
