#include "train/event_record.h"

#include <bit>

#include "base/crc32c.h"

namespace tessera::train {
namespace {

// Fields of the messages, from TensorBoard's event.proto and summary.proto.
constexpr int kEventWallTime = 1;
constexpr int kEventStep = 2;
constexpr int kEventFileVersion = 3;
constexpr int kEventSummary = 5;
constexpr int kEventSessionLog = 7;
constexpr int kSummaryValue = 1;
constexpr int kValueTag = 1;
constexpr int kValueSimpleValue = 2;
constexpr int kSessionLogStatus = 1;
constexpr uint64_t kSessionStart = 1;

template <class Number>
void put_little_endian(std::string& out, Number number) {
  for (size_t i = 0; i < sizeof(Number); ++i) {
    out.push_back(static_cast<char>(number >> (8 * i)));
  }
}

/// A message in protobuf's wire format, field by field.
class Message {
 public:
  void number(int field, uint64_t value) {
    key(field, 0);
    varint(value);
  }
  void float64(int field, double value) {
    key(field, 1);
    put_little_endian(bytes_, std::bit_cast<uint64_t>(value));
  }
  void float32(int field, float value) {
    key(field, 5);
    put_little_endian(bytes_, std::bit_cast<uint32_t>(value));
  }
  /// Text, or another message.
  void bytes(int field, std::string_view value) {
    key(field, 2);
    varint(value.size());
    bytes_ += value;
  }
  const std::string& written() const {
    return bytes_;
  }

 private:
  void key(int field, uint64_t wire_type) {
    varint(static_cast<uint64_t>(field) << 3 | wire_type);
  }
  void varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes_.push_back(static_cast<char>(value | 0x80));
    }
    bytes_.push_back(static_cast<char>(value));
  }

  std::string bytes_;
};

Message event_at(double wall_time) {
  Message event;
  event.float64(kEventWallTime, wall_time);
  return event;
}

} // namespace

std::string framed(std::string_view payload) {
  std::string record;
  put_little_endian(record, static_cast<uint64_t>(payload.size()));
  put_little_endian(record, masked_crc32c(record));
  record += payload;
  put_little_endian(record, masked_crc32c(payload));
  return record;
}

std::string version_event(double wall_time) {
  Message event = event_at(wall_time);
  event.bytes(kEventFileVersion, "brain.Event:2");
  return event.written();
}

std::string restart_event(double wall_time, int64_t step) {
  Message session;
  session.number(kSessionLogStatus, kSessionStart);
  Message event = event_at(wall_time);
  event.number(kEventStep, static_cast<uint64_t>(step));
  event.bytes(kEventSessionLog, session.written());
  return event.written();
}

std::string scalars_event(
    double wall_time,
    int64_t step,
    std::span<const EventScalar> scalars) {
  Message summary;
  for (const EventScalar& scalar : scalars) {
    Message value;
    value.bytes(kValueTag, scalar.tag);
    value.float32(kValueSimpleValue, static_cast<float>(scalar.value));
    summary.bytes(kSummaryValue, value.written());
  }
  Message event = event_at(wall_time);
  event.number(kEventStep, static_cast<uint64_t>(step));
  event.bytes(kEventSummary, summary.written());
  return event.written();
}

} // namespace tessera::train
