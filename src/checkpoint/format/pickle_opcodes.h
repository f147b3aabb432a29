// Opcodes of pickle that torch writes; docs/formats/dcp.md has their operands.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::format {

enum class Opcode : uint8_t {
  Mark = '(',
  Stop = '.',
  None = 'N',
  NewTrue = 0x88,
  NewFalse = 0x89,
  BinInt = 'J',
  BinInt1 = 'K',
  BinInt2 = 'M',
  Long1 = 0x8a,
  BinFloat = 'G',
  BinUnicode = 'X',
  ShortBinUnicode = 0x8c,
  BinUnicode8 = 0x8d,
  BinBytes = 'B',
  ShortBinBytes = 'C',
  BinBytes8 = 0x8e,
  ByteArray8 = 0x96,
  EmptyList = ']',
  Append = 'a',
  Appends = 'e',
  EmptyTuple = ')',
  Tuple = 't',
  Tuple1 = 0x85,
  Tuple2 = 0x86,
  Tuple3 = 0x87,
  EmptyDict = '}',
  SetItem = 's',
  SetItems = 'u',
  EmptySet = 0x8f,
  AddItems = 0x90,
  FrozenSet = 0x91,
  BinPut = 'q',
  LongBinPut = 'r',
  Memoize = 0x94,
  BinGet = 'h',
  LongBinGet = 'j',
  Global = 'c',
  StackGlobal = 0x93,
  Reduce = 'R',
  NewObj = 0x81,
  Build = 'b',
  BinPersId = 'Q',
  Proto = 0x80,
  Frame = 0x95,
};

/// The opcode's name, such as "REDUCE", also for refused opcodes; "0xff" for
/// bytes that are not opcodes.
std::string opcode_name(uint8_t code);

} // namespace tessera::format
