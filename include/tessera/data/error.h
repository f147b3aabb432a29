#pragma once

#include <tessera/error.h>

namespace tessera::data {

/// A sample that cannot be read, or a file of data that cannot be read, cannot
/// be written or is damaged. The text names the source, and the sample or the
/// file.
class TESSERA_API DataError : public c10::Error {
  using Error::Error;
};

} // namespace tessera::data
