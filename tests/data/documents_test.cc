#include "efla/data/documents.h"

#include <gtest/gtest.h>

#include "efla/base/random.h"
#include "tests/support/byte_level.h"
#include "tests/support/expect_error.h"
#include "tests/support/gzip.h"
#include "tests/support/pack.h"
#include "tests/support/temp_folder.h"

namespace efla::data {
namespace {

using test::expect_bad_content;
using test::TempFolder;
using test::write_text;

using Texts = std::vector<std::string>;

class Documents : public testing::Test {
 protected:
  // The documents of the files in the folder; bytes are cut anywhere, and none is lost.
  Texts read(const std::vector<std::string>& names, std::size_t input = 0, std::int64_t document = 0) {
    std::vector<std::filesystem::path> files;
    for (const auto& name : names) files.push_back(folder_ / name);
    DocumentReader reader(files, {}, *tokenizer_);
    if (input + static_cast<std::size_t>(document) > 0) reader.skip_to(input, document);
    Texts texts;
    bool begun = false;
    for (DocumentPart part; reader.next(part); begun = !part.last) {
      EXPECT_EQ(part.first, !begun);
      if (part.first) texts.emplace_back();
      texts.back() += part.text;
    }
    EXPECT_FALSE(begun);
    return texts;
  }

  Texts read_text(const std::string& text) {
    write_text(folder_ / "t.txt", text);
    return read({"t.txt"});
  }

  Texts read_json(const std::string& text) {
    write_text(folder_ / "t.jsonl", text);
    return read({"t.jsonl"});
  }

  TempFolder folder_;
  std::unique_ptr<Tokenizer> tokenizer_ = load_tokenizer("bytes");
};

TEST_F(Documents, OfTextAreWhatLiesBetweenSeparators) {
  EXPECT_EQ(read_text("one"), Texts{"one"});
  EXPECT_EQ(read_text("one\n<|endoftext|>\ntwo\n\n<|endoftext|>\n"), (Texts{"one\n", "two\n\n"}));
  EXPECT_EQ(read_text("<|endoftext|>\n\n<|endoftext|>\n<|endoftext|>\nx\n<|endoftext|>"), (Texts{"\n", "x\n"}));
  EXPECT_EQ(read_text("a <|endoftext|>\n <|endoftext|>\n<|endoftext|> \n<|endoftext|"),
            Texts{"a <|endoftext|>\n <|endoftext|>\n<|endoftext|> \n<|endoftext|"});
  EXPECT_EQ(read_text("one\r\n<|endoftext|>\r\ntwo\r\n<|endoftext|>\r"), (Texts{"one\r\n", "two\r\n"}));
  EXPECT_EQ(read_text("<|endoftext|>\r\r\n<|endoftext|>x\r\n"), Texts{"<|endoftext|>\r\r\n<|endoftext|>x\r\n"});
  for (std::size_t size = (1 << 18) - 17; size < 1 << 18; ++size) {  // a separator on the border of two reads
    const std::string line(size - 1, 'x');
    EXPECT_EQ(read_text(line + "\n<|endoftext|>\r\ny"), (Texts{line + "\n", "y"})) << size;
  }
  EXPECT_EQ(read_text(""), Texts{});
  EXPECT_EQ(read_text("<|endoftext|>"), Texts{});
}

TEST_F(Documents, DoNotHoldTheByteOrderMarkOfTheirFile) {
  const std::string mark = "\xef\xbb\xbf";
  EXPECT_EQ(read_text(mark + "one\n<|endoftext|>\n" + mark + "two"), (Texts{"one\n", mark + "two"}));
  EXPECT_EQ(read_text(mark + "<|endoftext|>\none"), Texts{"one"});
  EXPECT_EQ(read_text(mark), Texts{});
  EXPECT_EQ(read_json(mark + "{\"text\": \"one\"}\n"), Texts{"one"});
}

TEST_F(Documents, OfTextOfAnySizeComeWhole) {
  Random random(3);
  for (int i = 0; i < 20; ++i) {
    Texts documents;
    std::string text;
    for (std::uint32_t d = 1 + random.below(4); d > 0; --d) {
      std::string document;
      for (std::uint32_t lines = 1 + random.below(4); lines > 0; --lines) {
        document += std::string(random.below(1 + (1U << random.below(20))), 'x') + (random.below(2) ? "é\n" : "\n");
      }
      documents.push_back(document);
      text += document + "<|endoftext|>\n";
    }
    EXPECT_EQ(read_text(text), documents);
  }
}

TEST_F(Documents, OfJsonLinesAreTheirFields) {
  EXPECT_EQ(read_json("{\"text\": \"one\\ntwo\", \"id\": 1}\n\n{\"text\": \"\"}\r\n{\"text\":\"\\u00e9\"}"),
            (Texts{"one\ntwo", "é"}));
  const std::string big(700'000, 'y');
  EXPECT_EQ(read_json("{\"text\": \"" + big + "\"}\n{\"text\": \"z\"}\n"), (Texts{big, "z"}));
}

TEST_F(Documents, MayBePacked) {
  const std::string text = "one\n<|endoftext|>\ntwo\n", lines = "{\"text\": \"three\"}\n";
  write_text(folder_ / "a.txt.gz", test::gzip(text));
  write_text(folder_ / "b.JSONL.XZ", test::xz(lines));
  write_text(folder_ / "c.ndjson.zst", test::zstd(lines));
  write_text(folder_ / "c4.json.gz", test::gzip(lines));
  write_text(folder_ / "d", text);
  const Texts all{"one\n", "two\n", "three", "three", "one\n", "two\n"};
  EXPECT_EQ(read({"a.txt.gz", "b.JSONL.XZ", "c.ndjson.zst", "d"}), all);
  EXPECT_EQ(read({"c4.json.gz"}), Texts{"three"});
  for (std::size_t skipped = 0; skipped < all.size(); ++skipped) {
    const std::vector<std::pair<std::size_t, std::int64_t>> places{{0, 0}, {0, 1}, {0, 2}, {1, 1}, {2, 1}, {3, 1}};
    const auto [input, document] = places[skipped];
    EXPECT_EQ(read({"a.txt.gz", "b.JSONL.XZ", "c.ndjson.zst", "d"}, input, document),
              Texts(all.begin() + static_cast<std::ptrdiff_t>(skipped), all.end()));
  }
  test::expect_error([&] { read({"d"}, 0, 3); }, "inputs", "got fewer than 3 documents in ");
}

TEST_F(Documents, NameTheByteThatIsNotUtf8) {
  expect_bad_content([&] { read_text("good\nb\xff"); }, 6, "not UTF-8");
  expect_bad_content([&] { read_text("cut \xe2\x82"); }, 4, "not UTF-8");
  expect_bad_content([&] { read_text(std::string(600'001, 'a') + "\xc3\n"); }, 600'001, "not UTF-8");
  expect_bad_content([&] { read_json("{\"text\": \"a\"}\n{\"text\": \"\xc0\"}\n"); }, 24, "not UTF-8");
  write_text(folder_ / "p.gz", test::gzip("ab\xff"));
  expect_bad_content([&] { read({"p.gz"}); }, 2, "p.gz (unpacked): at byte 2: not UTF-8");
  // A character on the border of two reads is whole.
  EXPECT_EQ(read_text(std::string((1 << 18) - 1, 'a') + "é").front().size(), (1U << 18) + 1);
}

TEST_F(Documents, NameTheLineOfJsonThatIsWrong) {
  expect_bad_content([&] { read_json("{\"text\": \"a\"}\n{\"txt\": \"b\"}\n"); }, 14,
                     "line 2: text: got nothing, expected a text");
  expect_bad_content([&] { read_json("[1]\n"); }, 0, "line 1: got [1], expected an object");
  expect_bad_content([&] { read_json("\n{\"text\": 3}\n"); }, 1, "line 2: text: got 3, expected a text");
  expect_bad_content([&] { read_json("{\"text\": \"a\"\n"); }, 12, "not JSON");
  for (const char* list : {"[\n{\"text\": \"a\"},\n{\"text\": \"b\"}\n]\n", "[\r\n]\r\n", "{ \n}\n"}) {
    expect_bad_content([&] { read_json(list); }, 1, "not JSON on one line, expected one object per line");
  }
  expect_bad_content([&] { read_json("{\"text\": \"\\ud800\"}\n"); }, 16, "not JSON");
}

// Returns the parts of a text file that is one document.
Texts parts_of(const std::string& text, const Tokenizer& tokenizer) {
  const TempFolder folder;
  DocumentReader reader({std::filesystem::path(write_text(folder / "t.txt", text))}, {}, tokenizer);
  Texts parts;
  for (DocumentPart part; reader.next(part);) {
    EXPECT_EQ(part.first, parts.empty());
    parts.push_back(part.text);
  }
  return parts;
}

TEST(DocumentParts, AreSmallInTextsWithoutSpaces) {
  const TempFolder folder;
  const auto path = write_text(folder / "tokenizer.json", test::byte_level_json(test::byte_level_step(true)).dump());
  const auto tokenizer = load_tokenizer(path);
  for (const std::string line :
       {"天地玄黄宇宙洪荒\n", "天地玄黄，宇宙洪荒。", "слово и ещё одно. ", "the “word” — ", "1,2,3,4;"}) {
    std::string text, joined;
    while (text.size() < 1'000'000) text += line;
    std::vector<std::int32_t> ids;
    for (const auto& part : parts_of(text, *tokenizer)) {
      EXPECT_LE(part.size(), 1U << 16) << line;
      const auto more = tokenizer->encode_part(part, joined.empty());
      ids.insert(ids.end(), more.begin(), more.end());
      joined += part;
    }
    EXPECT_EQ(joined, text);
    EXPECT_EQ(ids, tokenizer->encode(text)) << line;
  }
}

TEST(DocumentParts, AreWholeTextsWhereNoneCanBeCut) {
  const TempFolder folder;
  const auto path = write_text(folder / "tokenizer.json", test::byte_level_json(test::byte_level_step(false)).dump());
  const std::string text((std::size_t{1} << 26) + 5, 'x');
  EXPECT_EQ(parts_of(text, *load_tokenizer(path)), Texts{text});
}

TEST(ListInputs, GoesThroughFoldersInOrder) {
  const TempFolder folder;
  std::filesystem::create_directories(folder / "b/.hidden");
  std::filesystem::create_directories(folder / "empty");
  for (const char* name : {"b/2", "b/10", "b/.skipped", "b/.hidden/x", "c", "a.txt"}) write_text(folder / name, "x");
  const std::vector<std::filesystem::path> all{folder / "a.txt", folder / "b/10", folder / "b/2", folder / "c"};
  EXPECT_EQ(list_inputs({folder.path()}), all);
  EXPECT_EQ(list_inputs({folder.file("c"), folder.file("b")}),
            (std::vector<std::filesystem::path>{folder / "c", folder / "b/10", folder / "b/2"}));
  test::expect_error([&] { list_inputs({folder.file("empty")}); }, "inputs", "a folder without files");
  test::expect_io_error([&] { list_inputs({folder.file("none")}); }, IoError::Kind::missing, -1,
                        "there is no such file or folder");
}

TEST(ListInputs, FollowsLinksToFilesAndRefusesOthers) {
  const TempFolder folder;
  std::filesystem::create_directories(folder / "in/below");
  write_text(folder / "in/below/file", "x");
  std::filesystem::create_symlink("below/file", folder / "in/link");
  const std::vector<std::filesystem::path> both{folder / "in/below/file", folder / "in/link"};
  EXPECT_EQ(list_inputs({folder.file("in")}), both);
  const auto refused = [&](const std::string& target, const std::string& says) {
    std::filesystem::create_symlink(target, folder / "in/other");
    expect_bad_content([&] { list_inputs({folder.file("in")}); }, -1, folder.file("in/other") + ": " + says);
    std::filesystem::remove(folder / "in/other");
  };
  refused("none", "is a link that leads nowhere");
  refused("other", "is a link that leads nowhere");
  refused("..", "is a link to a folder");
  refused("below", "is a link to a folder");
  refused("/dev/null", "is not a regular file");
  std::filesystem::create_symlink("below", folder / "in/.other");
  EXPECT_EQ(list_inputs({folder.file("in")}), both);
}

}  // namespace
}  // namespace efla::data
