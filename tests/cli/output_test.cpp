// SPDX-License-Identifier: Apache-2.0
// Outputs appear whole or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>  // NOLINT(modernize-deprecated-headers): POSIX
#include <sys/stat.h>

#include <thread>

#include "files.hpp"
#include "io/output_file.hpp"
#include "program.hpp"

namespace flamia::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class Output : public testing::Test {
 protected:
  void SetUp() override { Sample().write(folder / "in"); }
  Outcome attend(const std::string& out, const std::string& stdout_path = "") {
    return run({"attend", folder / "in", "--recipe", "bf16", "--out", out}, stdout_path);
  }
  Folder folder;
};

TEST_F(Output, NeedsNoSuffixAndReplacesWhatWasThere) {
  std::ofstream(folder / "result") << "old";
  ::chmod((folder / "result").c_str(), 0640);
  ASSERT_EQ(attend(folder / "result").code, 0);
  EXPECT_EQ(read(folder / "result", "out").info.shape, (std::vector<std::uint64_t>{150, 2, 64}));
  struct stat facts;
  ASSERT_EQ(::stat((folder / "result").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0640u);
  EXPECT_THAT(folder.names(), ElementsAre("in", "result"));
}

TEST_F(Output, MayNotBeTheInput) {
  const std::string before = contents(folder / "in");
  ASSERT_EQ(::symlink("in", (folder / "alias").c_str()), 0);
  for (const char* name : {"in", "alias"}) {
    EXPECT_EQ(attend(folder / name).code, 2) << name;
    EXPECT_EQ(contents(folder / "in"), before) << name;
  }
}

TEST_F(Output, TheInputMayBeAPipe) {
  ASSERT_EQ(attend(folder / "file").code, 0);
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(pipe, std::ios::binary) << contents(folder / "in"); });
  EXPECT_EQ(run({"attend", pipe, "--recipe", "bf16", "--out", folder / "piped"}).code, 0);
  writer.join();
  EXPECT_EQ(contents(folder / "piped"), contents(folder / "file"));
}

TEST_F(Output, FollowsLinks) {
  ::mkdir((folder / "elsewhere").c_str(), 0755);
  ASSERT_EQ(::symlink("elsewhere/result", (folder / "link").c_str()), 0);
  ASSERT_EQ(attend(folder / "link").code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read(folder / "elsewhere/result", "lse").info.shape, (std::vector<std::uint64_t>{2, 150}));
}

TEST_F(Output, APipeIsWrittenInPlace) {
  ASSERT_EQ(attend(folder / "file").code, 0);
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::string got;
  std::thread reader([&] { got = contents(pipe); });
  EXPECT_EQ(attend(pipe).code, 0);
  reader.join();
  EXPECT_EQ(got, contents(folder / "file"));
  struct stat facts;
  ASSERT_EQ(::stat(pipe.c_str(), &facts), 0);
  EXPECT_TRUE(S_ISFIFO(facts.st_mode));
  EXPECT_THAT(folder.names(), ElementsAre("file", "in", "pipe"));
}

TEST_F(Output, StandardOutputIsWrittenInPlaceEvenIfItIsAFile) {
  ASSERT_EQ(attend(folder / "file").code, 0);
  std::ofstream(folder / "redirected") << "";
  struct stat before, after;
  ASSERT_EQ(::stat((folder / "redirected").c_str(), &before), 0);
  for (const char* name : {"/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"}) {
    ASSERT_EQ(attend(name, folder / "redirected").code, 0);
    EXPECT_EQ(contents(folder / "redirected"), contents(folder / "file"));
  }
  ASSERT_EQ(::stat((folder / "redirected").c_str(), &after), 0);
  EXPECT_EQ(before.st_ino, after.st_ino);
  const Outcome both = run({"attend", folder / "in", "--recipe", "bf16", "--json", "--out", "/dev/stdout"});
  EXPECT_EQ(both.code, 2);
  EXPECT_THAT(both.err, HasSubstr("--json"));
}

TEST_F(Output, FullDevice) {
  const Outcome outcome = attend("/dev/full");
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("No space left"));
  EXPECT_EQ(run({"recipes"}, "/dev/full").code, 4);
}

TEST_F(Output, FullDeviceForHelp) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"}, {"attend", "--help"}, {"--version"}, {"recipes"}}) {
    const Outcome full = run(arguments, "/dev/full");
    EXPECT_EQ(full.code, 4) << arguments[0];
    EXPECT_THAT(full.err, HasSubstr("standard output"));
    EXPECT_EQ(run(arguments).code, 0) << arguments[0];
  }
}

TEST_F(Output, FullDiskLeavesNothing) {
  // A file size limit stops the write half way, as a full disk would.
  const std::string script = "ulimit -f 64; trap '' XFSZ; exec '" + program_path() + "' attend '" + (folder / "in") +
                             "' --recipe bf16 --out '" + (folder / "out") + "'";
  const Folder other;
  EXPECT_EQ(finish(start({"-c", script}, other / "out", other / "err", "/bin/sh")), 4);
  EXPECT_THAT(contents(other / "err"), HasSubstr("File too large"));
  EXPECT_THAT(folder.names(), ElementsAre("in"));
}

TEST_F(Output, ReadOnly) {
  std::ofstream(folder / "out") << "old";
  ::chmod((folder / "out").c_str(), 0444);
  const Outcome outcome = attend(folder / "out");
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("read-only"));
  EXPECT_EQ(contents(folder / "out"), "old");
  EXPECT_EQ(attend(folder / "no/such/folder").code, 4);
  EXPECT_EQ(attend("/proc/flamia").code, 4);
  EXPECT_EQ(attend("").code, 4);
  EXPECT_THAT(folder.names(), ElementsAre("in", "out"));
}

TEST_F(Output, SignalsLeaveNothing) {
  cli::OutputFile* out = nullptr;
  const pid_t child = ::fork();
  if (child == 0) {
    out = new cli::OutputFile;
    if (!out->open(folder / "out").ok() || !out->write("half", 4).ok()) ::_exit(3);
    std::ofstream(folder / "ready") << "";
    ::pause();
    ::_exit(0);
  }
  while (!std::filesystem::exists(folder / "ready")) std::this_thread::yield();
  EXPECT_EQ(folder.names().size(), 3u);  // the temporary file is there
  ::kill(child, SIGTERM);
  EXPECT_EQ(finish(child), -SIGTERM);
  EXPECT_THAT(folder.names(), ElementsAre("in", "ready"));
}

TEST_F(Output, ABrokenPipeIsAnError) {
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  Sample large;
  large.tokens = 2000, large.cu_seqlens = {0, 2000};
  large.write(folder / "in");
  std::thread reader([&] { ::close(::open(pipe.c_str(), O_RDONLY)); });
  const Outcome outcome = attend(pipe);
  reader.join();
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("Broken pipe"));
}

TEST_F(Output, FoldersAreLookedAtBeforeTheWork) {
  // tables of this size take many minutes
  for (const char* out : {"/dev/full", "/proc/flamia"}) {
    EXPECT_EQ(run({"tables", "--tokens", "8192", "--data", FLAMIA_DATA, "--out", out}).code, 4);
    EXPECT_EQ(run({"demo", "--data", FLAMIA_DATA, "--out", out}).code, 4);
  }
}

TEST_F(Output, NamesThatAreNoText) {
  // JSON cannot hold them; the result is there all the same
  const std::string out = folder / "\xff";
  const Outcome outcome = run({"attend", folder / "in", "--recipe", "bf16", "--out", out, "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(std::filesystem::exists(out));
  EXPECT_EQ(run({"quantize", folder / "in", "--recipe", "mxfp8", "--out", out, "--json"}).code, 0);
}

TEST_F(Output, Csv) {
  EXPECT_EQ(run({"accuracy", folder / "in", "--recipes", "bf16", "--csv", "/dev/full"}).code, 4);
  EXPECT_EQ(run({"accuracy", folder / "in", "--recipes", "bf16", "--csv", folder / "no/such/folder"}).code, 4);
  const Outcome good = run({"accuracy", folder / "in", "--recipes", "bf16", "--csv", folder / "table"});
  EXPECT_EQ(good.code, 0);
  EXPECT_THAT(contents(folder / "table"), HasSubstr("recipe,head,o_cosine"));
}

}  // namespace
}  // namespace flamia::test
