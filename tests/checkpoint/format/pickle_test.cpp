#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "checkpoint/format/pickle_reader.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/support.h"

namespace tessera::format {
namespace {

using std::string_literals::operator""s;
using testing::AllOf;
using testing::HasSubstr;

// A pickle of protocol 2 around `program`.
Value read(const std::string& program) {
  return read_pickle(as_bytes("\x80\x02"s + program + "."));
}

std::string refused(const std::string& program) {
  return refusal([&] { read(program); });
}

Value round_trip(const Value& value) {
  return read_pickle(as_bytes(write_pickle(value)));
}

std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}

template <class... Items>
Value list(Items... items) {
  return List{{Value(items)...}};
}

TEST(PickleReaderTest, ReadsEveryOpcodeForNumbers) {
  EXPECT_EQ(read("N"), Value(None{}));
  EXPECT_EQ(read("\x88"), Value(true));
  EXPECT_EQ(read("\x89"), Value(false));
  EXPECT_EQ(read("K\xff"), Value(255));
  EXPECT_EQ(read("M\x01\x02"), Value(0x0201));
  EXPECT_EQ(read("J\xff\xff\xff\xff"), Value(-1));
  EXPECT_EQ(read("\x8a\x00"s), Value(0));
  EXPECT_EQ(read("\x8a\x01\xff"), Value(-1));
  EXPECT_EQ(read("\x8a\x05\x00\x00\x00\x80\x00"s), Value(int64_t{1} << 31));
  EXPECT_EQ(
      read("\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"s), Value(INT64_MIN));
  EXPECT_EQ(read("G\x3f\xf8\x00\x00\x00\x00\x00\x00"s), Value(1.5));
}

TEST(PickleReaderTest, ReadsEveryOpcodeForText) {
  EXPECT_EQ(read("X\x02\x00\x00\x00hi"s), Value("hi"));
  EXPECT_EQ(read("\x8c\x02hi"), Value("hi"));
  EXPECT_EQ(read("\x8d\x02\x00\x00\x00\x00\x00\x00\x00hi"s), Value("hi"));
  const Value bytes = Bytes{"h\xff"};
  EXPECT_EQ(read("C\x02h\xff"), bytes);
  EXPECT_EQ(read("B\x02\x00\x00\x00h\xff"s), bytes);
  EXPECT_EQ(read("\x8e\x02\x00\x00\x00\x00\x00\x00\x00h\xff"s), bytes);
  EXPECT_EQ(read("\x96\x02\x00\x00\x00\x00\x00\x00\x00h\xff"s), bytes);
}

TEST(PickleReaderTest, ReadsContainers) {
  EXPECT_EQ(read("]"), list());
  EXPECT_EQ(
      read("]K\x01"
           "a"),
      list(1));
  EXPECT_EQ(
      read("](K\x01K\x02"
           "e"),
      list(1, 2));
  EXPECT_EQ(read(")"), Value(Tuple{}));
  EXPECT_EQ(read("K\x01\x85"), Value(Tuple{{1}}));
  EXPECT_EQ(read("K\x01K\x02\x86"), Value(Tuple{{1, 2}}));
  EXPECT_EQ(read("K\x01K\x02K\x03\x87"), Value(Tuple{{1, 2, 3}}));
  EXPECT_EQ(read("(K\x01K\x02t"), Value(Tuple{{1, 2}}));
  EXPECT_EQ(read("}K\x01K\x02s"), Value(Dict{{{1, 2}}}));
  EXPECT_EQ(read("}(K\x01K\x02u"), Value(Dict{{{1, 2}}}));
  EXPECT_EQ(read("\x8f(K\x01\x90"), Value(Set{{1}}));
  EXPECT_EQ(read("(K\x01\x91"), Value(Set{{1}}));
}

TEST(PickleReaderTest, SharesThroughTheMemo) {
  EXPECT_EQ(
      read("](K\x05q\x00h\x00"
           "e"s),
      list(5, 5));
  EXPECT_EQ(
      read("](K\x05\x94h\x00"
           "e"s),
      list(5, 5));
  EXPECT_EQ(
      read("](K\x05r\x00\x00\x00\x00j\x00\x00\x00\x00"
           "e"s),
      list(5, 5));
}

TEST(PickleReaderTest, ReadsFramesAndStackGlobals) {
  EXPECT_EQ(
      read_pickle(as_bytes("\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00"
                           "\x8c\x05torch\x8c\x04int8\x93."s)),
      Value(DType::Int8));
}

TEST(PickleReaderTest, ReadsOldNamesOfMemoryFormats) {
  const auto old = global(
      "torch.distributed._shard.sharded_tensor.metadata",
      "MEM_FORMAT_ENCODING");
  EXPECT_EQ(read(old + "K\x01\x85R"), Value(MemoryFormat::ChannelsLast));
  EXPECT_EQ(
      read(
          global("builtins", "getattr") + old +
          "\x8c\x13TORCH_CHANNELS_LAST\x86R"),
      Value(MemoryFormat::ChannelsLast));
}

TEST(PickleReaderTest, RejectsGlobalsByName) {
  EXPECT_THAT(
      refused(global("os", "system") + "\x8c\x02ls\x85R"),
      AllOf(HasSubstr("byte 2: GLOBAL"), HasSubstr("\"os.system\"")));
  EXPECT_THAT(
      refused("\x8c\x08"
              "builtins\x8c\x04"
              "eval\x93"),
      AllOf(HasSubstr("STACK_GLOBAL"), HasSubstr("\"builtins.eval\"")));
  EXPECT_THAT(
      refused(global("torch._utils", "_rebuild_sparse_tensor")),
      HasSubstr("_rebuild_sparse_tensor"));
  EXPECT_THAT(
      refused(global("torch", "quint8")), HasSubstr("\"torch.quint8\""));
}

TEST(PickleReaderTest, RejectsGetattrOfAnythingElse) {
  EXPECT_THAT(
      refused(
          global("builtins", "getattr") + global("torch", "Size") +
          "\x8c\x08__init__\x86R"),
      HasSubstr("getattr is for memory formats only"));
  EXPECT_THAT(
      refused(
          global("builtins", "getattr") +
          global(
              "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING") +
          "\x8c\x08__init__\x86R"),
      HasSubstr("\"__init__\""));
}

TEST(PickleReaderTest, RejectsOpcodesByName) {
  for (const auto& [code, name] :
       {std::pair('i', "INST"),
        std::pair('o', "OBJ"),
        std::pair('2', "DUP"),
        std::pair('0', "POP"),
        std::pair('P', "PERSID"),
        std::pair('\x92', "NEWOBJ_EX"),
        std::pair('\x82', "EXT1"),
        std::pair('\x97', "NEXT_BUFFER"),
        std::pair('\x8b', "LONG4"),
        std::pair('\xff', "0xff")}) {
    EXPECT_THAT(
        refused("N"s + code),
        AllOf(HasSubstr("byte 3"), HasSubstr("opcode "s + name + " is not")));
  }
  EXPECT_THAT(refused("\x80\x02"), HasSubstr("opcode PROTO is not"));
}

TEST(PickleReaderTest, RejectsLengthsBeyondTheInput) {
  EXPECT_THAT(
      refused("X\xff\xff\xff\xff"),
      HasSubstr("BINUNICODE wants 4294967295 bytes, 1 are left"));
  EXPECT_THAT(
      refused("\x8e\xff\xff\xff\xff\xff\xff\xff\xff"),
      HasSubstr("BINBYTES8 wants 18446744073709551615 bytes"));
  EXPECT_THAT(
      refused("\x95\xff\xff\xff\xff\xff\xff\xff\xff"),
      HasSubstr("FRAME is longer than the file"));
  EXPECT_THAT(
      refused("\x8a\x09"s + std::string(9, '\1')), HasSubstr("64 bits"));
  EXPECT_THAT(refused("Nr\xff\xff\xff\xff"), HasSubstr("gap in the memo"));
  EXPECT_THAT(refused("h\x07"), HasSubstr("wants 7 of the memo"));
  EXPECT_THAT(refused("ctorch"), HasSubstr("name without an end"));
}

TEST(PickleReaderTest, RejectsProgramsThatDoNotFit) {
  EXPECT_THAT(refused(""), HasSubstr("less than one value"));
  EXPECT_THAT(refused("NN"), HasSubstr("more or less than one value"));
  EXPECT_THAT(refused("(N"), HasSubstr("more or less than one value"));
  EXPECT_THAT(refused("\x85"), HasSubstr("TUPLE1 finds the stack empty"));
  EXPECT_THAT(refused("N(\x85"), HasSubstr("TUPLE1 finds the stack empty"));
  EXPECT_THAT(refused("Nt"), HasSubstr("TUPLE finds no mark"));
  EXPECT_THAT(refused("}(Nu"), HasSubstr("key without a value"));
  EXPECT_THAT(refused("NNa"), HasSubstr("APPEND is not on a list"));
  EXPECT_THAT(refused("]NNs"), HasSubstr("SETITEM is not on a dict"));
  EXPECT_THAT(refused("](N\x90"), HasSubstr("ADDITEMS is not on a set"));
  EXPECT_THAT(refused("NN\x93"), HasSubstr("wants two strings"));
  EXPECT_THAT(refused("N)R"), HasSubstr("REDUCE wants a global and a tuple"));
  EXPECT_THAT(refused("NNb"), HasSubstr("BUILD is not on a new object"));
  EXPECT_THAT(refused("q\x01"), HasSubstr("gap in the memo"));
  EXPECT_THAT(refused("q"s + '\0'), HasSubstr("stack empty"));
  EXPECT_THAT(refused("X\x01\x00\x00\x00\xff"s), HasSubstr("not UTF-8"));
  EXPECT_THAT(refused("NQ"), HasSubstr("does not name a storage"));
  EXPECT_THAT(
      refused(global("torch", "FloatStorage")),
      HasSubstr("where a value belongs"));
  EXPECT_THAT(
      refused(global("torch", "Size") + ")\x81"),
      HasSubstr("not how torch writes"));
  EXPECT_THAT(
      refused(
          global("torch.distributed.checkpoint.metadata", "Metadata") + ")R"),
      HasSubstr("not how torch writes"));
  EXPECT_THAT(
      refusal([] { read_pickle(as_bytes("\x80\x02N.x")); }),
      HasSubstr("byte 4: 1 bytes after the end"));
  EXPECT_THAT(
      refusal([] { read_pickle(as_bytes("\x80\x02N")); }),
      HasSubstr("ends before its STOP"));
  EXPECT_THAT(
      refusal([] { read_pickle(as_bytes("\x80\x06N.")); }),
      HasSubstr("pickle protocol 6"));
  EXPECT_THAT(
      refusal([] { read_pickle(as_bytes("(lp0\n.")); }),
      HasSubstr("not a pickle of protocol 2"));
}

TEST(PickleReaderTest, RejectsArgumentsThatTorchDoesNotWrite) {
  EXPECT_THAT(
      refused(global("torch", "Size") + "K\x01\x85R"),
      HasSubstr("torch.Size has an int as argument 0"));
  EXPECT_THAT(
      refused(global("torch", "Size") + "N\x85\x85R"),
      HasSubstr("torch.Size has a tuple with None in it"));
  EXPECT_THAT(
      refused(global("torch", "Size") + ")R"), HasSubstr("has 0 arguments"));
  EXPECT_THAT(
      refused(global("_codecs", "encode") + "\x8c\x01x\x8c\x05rot13\x86R"),
      HasSubstr("\"rot13\""));
  EXPECT_THAT(
      refused(
          global("_codecs", "encode") +
          "\x8c\x03\xe2\x82\xac\x8c\x06latin1\x86R"),
      HasSubstr("not a byte"));
  EXPECT_THAT(
      refused(global("collections", "OrderedDict") + "]\x85R"),
      HasSubstr("OrderedDict"));
  EXPECT_THAT(
      refused(global("torch._utils", "_rebuild_tensor_v2") + ")R"),
      HasSubstr("_rebuild_tensor_v2 has 0 arguments"));
}

TEST(PickleReaderTest, RejectsValuesThatContainThemselves) {
  EXPECT_THAT(
      refused("]q\x00h\x00"
              "a"s),
      HasSubstr("contains itself"));
  EXPECT_THAT(refused("]q\x00(h\x00te"s), HasSubstr("finds no mark"));
  EXPECT_THAT(refused("}q\x00K\x01h\x00s"s), HasSubstr("contains itself"));
}

TEST(PickleReaderTest, RejectsDeepNesting) {
  const auto nested = [](int depth) {
    return "N" + std::string(depth, '\x85');
  };
  EXPECT_EQ(refused(nested(127)), "accepted");
  EXPECT_THAT(refused(nested(128)), HasSubstr("nested more than 128 deep"));
  EXPECT_THAT(refused(nested(1000000)), HasSubstr("nested more than 128"));
  // Deep because of what the memo nests.
  EXPECT_THAT(
      refused(
          "]" + nested(100) + "q"s + '\0' + "ah"s + '\0' +
          std::string(100, '\x85') + "a"),
      HasSubstr("nested more than 128 deep"));
}

TEST(PickleReaderTest, RejectsWhatTheMemoBlowsUp) {
  // Each step is a list of ten times the one before.
  std::string laughs = "]N"s + "a\x94";
  for (char i = 0; i < 12; ++i) {
    laughs += "](";
    for (int j = 0; j < 10; ++j) {
      laughs += "h"s + i;
    }
    laughs += "e\x94";
  }
  laughs = "](" + laughs + "e";
  EXPECT_THAT(refused(laughs), HasSubstr("too many for its size"));
  // The same with text.
  std::string echo =
      "](X"s + "\x00\x00\x01\x00"s + std::string(65536, 'x') + "\x94";
  for (int i = 0; i < 65536; ++i) {
    echo += "h"s + '\0';
  }
  EXPECT_THAT(refused(echo + "e"), HasSubstr("too many for its size"));
}

TEST(PickleWriterTest, EveryKindRoundTrips) {
  Tensor tensor;
  tensor.storage = {"3", DType::Float32, "cpu", 12};
  tensor.offset = 2;
  tensor.sizes = {2, 3};
  tensor.strides = {3, 1};
  Tensor untyped = tensor;
  untyped.storage.dtype = std::nullopt;
  untyped.dtype = DType::UInt16;
  untyped.conj = untyped.neg = true;
  Tensor parameter = tensor;
  parameter.is_parameter = parameter.requires_grad = true;
  const Value value = list(
      None{},
      true,
      0,
      255,
      256,
      65536,
      -1,
      INT64_MIN,
      INT64_MAX,
      0.1,
      "text",
      std::string(1000, 'x'),
      Bytes{"\x00\x7f\x80\xff"s},
      Bytes{},
      Complex{1, -2},
      List{},
      Tuple{},
      Tuple{{1, 2, 3, 4}},
      Set{{1, "a"}},
      Dict{},
      Dict{{{1, "one"}, {"two", Tuple{{2}}}, {Tuple{{1}}, None{}}}},
      Size{{2, 3}},
      Size{},
      DType::BFloat16,
      Device{"cuda:1"},
      Layout{"torch.strided"},
      MemoryFormat::Preserve,
      Path{"a/b"},
      tensor,
      untyped,
      parameter,
      Object{Class::StorageMeta, Dict{{{"save_id", "x"}}}},
      Object{Class::BytesStorageMetadata, Dict{}});
  EXPECT_EQ(round_trip(value), value);
}

TEST(PickleWriterTest, NotANumberStaysOne) {
  EXPECT_TRUE(std::isnan(*round_trip(std::nan("")).get<double>()));
}

TEST(PickleWriterTest, EveryDTypeRoundTrips) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const Value dtype = static_cast<DType>(i);
    EXPECT_EQ(round_trip(dtype), dtype) << i;
  }
}

TEST(PickleWriterTest, NamesAreWrittenOnce) {
  List names;
  for (int i = 0; i < 600; ++i) {
    names.items.push_back("layer." + std::to_string(i % 300));
  }
  const auto pickle = write_pickle(names);
  EXPECT_EQ(pickle.find("layer.299"), pickle.rfind("layer.299"));
  EXPECT_EQ(read_pickle(as_bytes(pickle)), Value(names));
}

TEST(PickleWriterTest, ReadsBackWhatItRepeats) {
  for (const size_t length : {1, 96, 97, 500}) {
    List same;
    same.items.assign(20000, std::string(length, 'x'));
    EXPECT_EQ(round_trip(same), Value(same)) << length;
  }
}

TEST(PickleWriterTest, RejectsWhatCannotBeWritten) {
  EXPECT_THAT(refusal([] { write_pickle("\xff"); }), HasSubstr("not UTF-8: "));
  Value deep = None{};
  for (int i = 0; i < 100; ++i) {
    deep = List{{std::move(deep)}};
  }
  EXPECT_THAT(refusal([&] { write_pickle(deep); }), HasSubstr("nested"));
  EXPECT_THAT(
      refusal([] {
        write_pickle(Storage{"0", DType::UInt16, "cpu", 1});
      }),
      HasSubstr("no typed storage of uint16"));
}

} // namespace
} // namespace tessera::format
