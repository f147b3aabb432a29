#include "base/fields.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Fields = std::vector<std::string>;

TEST(FieldsTest, DecodesWhatWasEncoded) {
  for (const Fields& fields :
       {Fields{}, Fields{""}, Fields{"a", "", "b:c", "12:"}}) {
    EXPECT_EQ(decode_fields(encode_fields(fields)), fields);
  }
  EXPECT_EQ(encode_fields({"ab", "c"}), "2:ab1:c");
}

TEST(FieldsTest, RejectsWhatIsNotFields) {
  for (const char* text :
       {"x",
        "1",
        "1:",
        "5:ab",
        ":a",
        "-1:a",
        " 1:a",
        "99999999999999999999:a"}) {
    EXPECT_EQ(decode_fields(text), std::nullopt) << text;
  }
}

} // namespace
} // namespace tessera
