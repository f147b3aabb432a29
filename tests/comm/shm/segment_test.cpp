#include "comm/shm/segment.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <system_error>

#include "comm/shm/peers.h"
#include "comm/shm/shared_buffers.h"

namespace tessera::comm::shm {
namespace {

TEST(SegmentTest, APeerSeesWhatTheCreatorWrites) {
  Segment mine = Segment::create(8192);
  const auto locator = SegmentLocator::parse(mine.locator().to_string());
  Segment theirs = Segment::open(locator);
  EXPECT_NE(theirs.data(), mine.data());
  std::strcpy(reinterpret_cast<char*>(mine.data()), "hello");
  EXPECT_STREQ(reinterpret_cast<const char*>(theirs.data()), "hello");
}

TEST(SegmentTest, MappingsOutliveTheDescriptor) {
  Segment mine = Segment::create(4096);
  Segment theirs = Segment::open(mine.locator());
  const auto locator = mine.locator();
  mine = Segment();
  theirs.data()[0] = std::byte{1};
  EXPECT_THROW(Segment::open(locator), std::system_error);
}

TEST(SegmentTest, RejectsALocatorOfAnotherSegment) {
  Segment one = Segment::create(4096);
  auto locator = one.locator();
  locator.inode += 1;
  EXPECT_THROW(Segment::open(locator), std::system_error);
  EXPECT_THROW(SegmentLocator::parse("12 x 1 1"), std::invalid_argument);
  EXPECT_THROW(SegmentLocator::parse("1 2 3 4 5"), std::invalid_argument);
}

TEST(PeersTest, SeesAnEndedProcessThoughNobodyReapedIt) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const Peers peers({getpid(), child});
  EXPECT_TRUE(peers.is_alive(0));
  EXPECT_TRUE(peers.is_alive(1));
  kill(child, SIGKILL);
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_FALSE(peers.is_alive(1));
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(peers.is_alive(1));
}

TEST(SharedBuffersTest, FindsABufferByAddressAndByNumber) {
  const auto buffers = std::make_shared<SharedBuffers>();
  auto buffer = buffers->add(7, Segment::create(4096));
  const auto place = buffers->find(buffer->data() + 100, 50);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->id, 7u);
  EXPECT_EQ(place->offset, 100u);
  EXPECT_EQ(buffers->at(7, 100), buffer->data() + 100);
  EXPECT_FALSE(buffers->find(buffer->data() + 4000, 200).has_value());
  int elsewhere = 0;
  EXPECT_FALSE(buffers->find(&elsewhere, sizeof elsewhere).has_value());
  buffer.reset();
  EXPECT_THROW(buffers->at(7, 0), std::runtime_error);
}

} // namespace
} // namespace tessera::comm::shm
