#include "comm/shm/segment.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "base/unique_fd.h"
#include "comm/shm/peer_processes.h"
#include "comm/shm/shared_buffers.h"

namespace tessera::comm::shm {
namespace {

using ::testing::HasSubstr;

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

/// A descriptor as a peer would announce it.
SegmentLocator locator_of(int fd, pid_t pid = getpid()) {
  struct stat status {};
  EXPECT_EQ(fstat(fd, &status), 0);
  return {
      .pid = pid,
      .fd = fd,
      .bytes = static_cast<uint64_t>(status.st_size),
      .inode = status.st_ino};
}

std::string error_of_opening(const SegmentLocator& locator) {
  try {
    Segment::open(locator);
  } catch (const std::system_error& error) {
    return error.what();
  }
  return "it was mapped";
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

int make_memfd(const char* name, int seals) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  EXPECT_EQ(ftruncate(fd, 4096), 0);
  EXPECT_EQ(fcntl(fd, F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(SegmentTest, OpensNothingButASealedMemfdOfOurs) {
  const UniqueFd good(make_memfd("tessera", kSeals));
  EXPECT_EQ(error_of_opening(locator_of(good.get())), "it was mapped");
  const UniqueFd open_ended(make_memfd("tessera", 0));
  EXPECT_THAT(
      error_of_opening(locator_of(open_ended.get())),
      HasSubstr("is not sealed"));
  const UniqueFd others(make_memfd("browser", kSeals));
  EXPECT_THAT(
      error_of_opening(locator_of(others.get())),
      HasSubstr("is not a memfd of Tessera"));
  // Neither a file of that name nor a pipe, which would not even open.
  char folder[] = "/tmp/memfd:XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string file = std::string(folder) + "/tessera";
  const UniqueFd plain(open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  EXPECT_EQ(ftruncate(plain.get(), 4096), 0);
  unlink(file.c_str());
  EXPECT_THAT(
      error_of_opening(locator_of(plain.get())),
      HasSubstr("is not a memfd of Tessera"));
  const std::string fifo = std::string(folder) + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const UniqueFd pipe(open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  EXPECT_THAT(
      error_of_opening(locator_of(pipe.get())),
      HasSubstr("is not a memfd of Tessera"));
  unlink(fifo.c_str());
  rmdir(folder);
}

TEST(SegmentTest, OpensNothingOfAnotherUser) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "another user cannot be played here (needs root)";
  }
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t neighbour = fork();
  if (neighbour == 0) {
    if (setuid(65533) == 0) {
      const int fd = make_memfd("tessera", kSeals);
      const std::string text = locator_of(fd).to_string();
      if (write(ends[1], text.data(), text.size()) > 0) {
        pause();
      }
    }
    _exit(1);
  }
  char text[96];
  const ssize_t length = read(ends[0], text, sizeof text);
  ASSERT_GT(length, 0);
  EXPECT_THAT(
      error_of_opening(SegmentLocator::parse(
          std::string(text, static_cast<size_t>(length)))),
      HasSubstr("belongs to user 65533, and this process to user 0"));
  kill(neighbour, SIGKILL);
  waitpid(neighbour, nullptr, 0);
  close(ends[0]);
  close(ends[1]);
}

TEST(SegmentTest, NobodyCanShrinkIt) {
  Segment mine = Segment::create(8192);
  const UniqueFd again(open(
      ("/proc/self/fd/" + std::to_string(mine.locator().fd)).c_str(),
      O_RDWR | O_CLOEXEC));
  EXPECT_NE(ftruncate(again.get(), 0), 0);
}

TEST(PeersTest, SeesAnEndedProcessThoughNobodyReapedIt) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const PeerProcesses peers({getpid(), child});
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
