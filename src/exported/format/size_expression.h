// Expressions of sizes, as numbers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "exported/format/program.h"

namespace tessera::exported {

/// A size that cannot be computed; what() says why.
struct UnknownSize : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The values of symbols, by name: "s77".
using SymbolValues = std::map<std::string, int64_t>;

/// Knows the arithmetic of shapes: sums, products, powers, divisions that round
/// down, Max and Min. Throws UnknownSize for other functions, for symbols
/// without a value, and for numbers that leave 64 bits.
int64_t evaluate(const Expression<int64_t>& size, const SymbolValues& symbols);

/// The symbol that is the whole expression, if it is one.
std::optional<std::string> symbol_of(const Expression<int64_t>& size);

} // namespace tessera::exported
