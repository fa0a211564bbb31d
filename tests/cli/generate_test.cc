// efla generate as a user meets it: prompts, sessions, dialogues, Ctrl-C, and mistakes.
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/nn/models/language_model_file.h"
#include "tests/engine/tiny_model.h"
#include "tests/nn/family_reference.h"
#include "tests/nn/random_family.h"
#include "tests/support/program.h"

namespace efla::test {
namespace {

using nlohmann::json;
using Arguments = std::vector<std::string>;

std::vector<json> lines_of(const std::string& text) {
  std::vector<json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(json::parse(line));
  return lines;
}

class GenerateCommand : public testing::Test {
 protected:
  GenerateCommand() {
    std::filesystem::create_directory(model());
    nn::save_language_model(tiny_model(), model());
  }

  std::string model() const { return folder.file("model"); }
  Arguments words(const Arguments& more) const {
    Arguments all{"generate", model(), "--tokenizer", "bytes", "--max-tokens", "30"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  ProgramResult generate(const Arguments& more) const { return run_program(words(more)); }
  std::vector<json> replies(Arguments more) const {
    more.emplace_back("--json");
    const auto result = generate(more);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return lines_of(result.out);
  }
  // The command as a shell's, with what the shell does before and behind it.
  ProgramResult shell(const std::string& before, const Arguments& more, const std::string& behind) const {
    std::string line = EFLA_PROGRAM;
    for (const auto& word : words(more)) line += " '" + word + "'";
    return run_command({"sh", "-c", before + line + behind});
  }

  const TempFolder folder;
  const Arguments warm{"--temperature", "1.1", "--top-k", "50", "--top-p", "0.95", "--repetition-penalty", "1.2"};
};

TEST_F(GenerateCommand, TextAndJsonOfOnePrompt) {
  const auto text = generate({"--prompt", "Once upon"});
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_EQ(utf8_prefix(text.out), text.out.size());
  for (const char* part : {"prompt: 9 tokens", "reply: 30 tokens, ", "tokens/s", "state: "}) {
    EXPECT_NE(text.err.find(part), std::string::npos) << text.err;
  }
  EXPECT_EQ(text.err.find("e+"), std::string::npos) << "a rate with an exponent: " << text.err;
  // The first token of a reply is drawn with the prompt, so a single one has no rate. Without a reply the prompt's last
  // token waits for the next one.
  EXPECT_NE(generate({"--prompt", "a", "--max-tokens", "1"}).err.find("prompt: 1 token, "), std::string::npos);
  EXPECT_NE(generate({"--prompt", "a", "--max-tokens", "1"}).err.find("reply: 1 token; "), std::string::npos);
  const auto session = folder.file("session");
  const auto prefilled = generate({"--prompt", "To be", "--max-tokens", "0", "--save-session", session});
  EXPECT_NE(prefilled.err.find("prompt: 5 tokens, "), std::string::npos) << prefilled.err;
  EXPECT_NE(prefilled.err.find("reply: 0 tokens; "), std::string::npos) << prefilled.err;
  const auto continued = generate({"--load-session", session, "--max-tokens", "3"});
  EXPECT_NE(continued.err.find("prompt: 0 tokens; reply: 3 tokens, "), std::string::npos) << continued.err;

  const auto lines = replies({"--prompt", "Once upon"});
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].at("text").get<std::string>() + "\n", text.out);
  EXPECT_EQ(lines[0].at("tokens"), 30);
  EXPECT_EQ(lines[0].at("end"), "max_tokens");
  EXPECT_EQ(lines[0].at("prefill_tokens"), 9);
  EXPECT_GT(lines[0].at("prefill_tokens_per_s").get<double>(), 0.0);
  EXPECT_GT(lines[0].at("decode_tokens_per_s").get<double>(), 0.0);
  EXPECT_GT(lines[0].at("state_bytes").get<std::int64_t>(), 0);
}

TEST_F(GenerateCommand, DraftsOfRepetitionsLeaveTheReplyAsItIs) {
  nn::save_language_model(repeating_model(), model());
  const auto with = [&](const Arguments& drafts) {
    Arguments arguments{"--prompt", "x", "--max-tokens", "100"};
    arguments.insert(arguments.end(), drafts.begin(), drafts.end());
    return replies(arguments).at(0);
  };
  const auto drafted = with({}), none = with({"--draft-tokens", "0"});
  EXPECT_EQ(drafted.at("text"), none.at("text"));
  EXPECT_GT(drafted.at("accepted_tokens").get<int>(), 0);
  EXPECT_EQ(none.at("drafted_tokens"), 0);
  const auto refused = generate({"--prompt", "x", "--draft-tokens", "8"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("--draft-tokens"), std::string::npos) << refused.err;
}

TEST_F(GenerateCommand, SeedsAndStopStrings) {
  const auto with = [&](Arguments more) {
    more.insert(more.end(), warm.begin(), warm.end());
    more.insert(more.end(), {"--prompt", "abc"});
    return replies(more).at(0);
  };
  const auto text = with({"--seed", "5"}).at("text").get<std::string>();
  EXPECT_EQ(with({"--seed", "5"}).at("text").get<std::string>(), text);
  EXPECT_NE(with({"--seed", "6"}).at("text").get<std::string>(), text);
  const auto begin = utf8_prefix(text.substr(0, 9));
  const auto stop = text.substr(begin, utf8_prefix(text.substr(begin, 5)));
  const auto stopped = with({"--seed", "5", "--stop", "not in there", "--stop", stop});
  EXPECT_EQ(stopped.at("text").get<std::string>(), text.substr(0, text.find(stop)));
  EXPECT_EQ(stopped.at("end"), "stop_string");
}

TEST_F(GenerateCommand, PromptsOfAFile) {
  write_text(folder / "prompts.txt", "one\r\ntwo, which is longer\r\nthree\n");
  write_text(folder / "prompts.jsonl", "{\"prompt\": \"one\"}\n{\"id\": 7, \"prompt\": \"two, which is longer\"}");
  Arguments arguments{"--prompts", folder.file("prompts.txt"), "--seed", "3"};
  arguments.insert(arguments.end(), warm.begin(), warm.end());
  const auto all = replies(arguments);
  ASSERT_EQ(all.size(), 3U);
  for (std::size_t i = 0; i < all.size(); ++i) {
    Arguments alone{"--prompt", all[i].at("prompt"), "--seed", std::to_string(3 + i)};
    alone.insert(alone.end(), warm.begin(), warm.end());
    EXPECT_EQ(replies(alone).at(0).at("text"), all[i].at("text"));
  }
  arguments[1] = folder.file("prompts.jsonl");
  const auto two = replies(arguments);
  ASSERT_EQ(two.size(), 2U);
  EXPECT_EQ(two[1].at("text"), all[1].at("text"));
  const auto text = generate(arguments);
  EXPECT_TRUE(text.out.starts_with("==> prompt 1 <==\n")) << text.out;
}

TEST_F(GenerateCommand, FilesOfPromptsMayHaveAByteOrderMarkAndBlankLinesAtTheEnd) {
  const std::string mark = "\xef\xbb\xbf";
  write_text(folder / "prompts.txt", mark + "one\n two \r\n\n \t\r\n\n");
  write_text(folder / "prompts.jsonl", mark + "{\"prompt\": \"one\"}\n{\"prompt\": \" two \"}\r\n\n \r\n");
  for (const char* name : {"prompts.txt", "prompts.jsonl"}) {
    const auto all = replies({"--prompts", folder.file(name)});
    ASSERT_EQ(all.size(), 2U) << name;
    EXPECT_EQ(all[0].at("prompt"), "one") << name;
    EXPECT_EQ(all[1].at("prompt"), " two ") << name;
  }
}

TEST_F(GenerateCommand, ASessionGoesOn) {
  const auto session = folder.file("session.safetensors");
  const auto continued = [&](const std::string& tokens, Arguments more) {
    more.insert(more.end(), warm.begin(), warm.end());
    more.insert(more.end(), {"--max-tokens", tokens});
    return more;
  };
  const auto whole = replies(continued("30", {"--prompt", "abc", "--seed", "4"})).at(0);
  std::string text;
  text += replies(continued("11", {"--prompt", "abc", "--seed", "4", "--save-session", session})).at(0).at("text");
  const auto size = std::filesystem::file_size(session);
  const auto last = generate(continued("19", {"--load-session", session, "--save-session", session, "--json"}));
  ASSERT_EQ(last.exit_code, 0) << last.err;
  EXPECT_NE(last.err.find("session: "), std::string::npos) << last.err;
  text += lines_of(last.out).at(0).at("text");
  // What could be half a character at the end is in the session, and no U+FFFD in the text.
  EXPECT_TRUE(whole.at("text").get<std::string>().starts_with(text)) << text;
  EXPECT_EQ(lines_of(last.out).at(0).at("tokens"), 19);
  EXPECT_NEAR(static_cast<double>(std::filesystem::file_size(session)), static_cast<double>(size), 32.0);

  // Prompts of a file go on from the same session each.
  write_text(folder / "prompts", "x\nx\n");
  const auto both = replies({"--load-session", session, "--prompts", folder.file("prompts")});
  EXPECT_EQ(both.at(0).at("text"), both.at(1).at("text"));  // greedy

  std::filesystem::create_directory(folder / "other");
  nn::save_language_model(tiny_model(2), folder / "other");
  EXPECT_TRUE(is_user_mistake(
      run_program({"generate", folder.file("other"), "--tokenizer", "bytes", "--load-session", session}),
      "this model"));
}

TEST_F(GenerateCommand, InteractiveKeepsTheState) {
  const auto session = folder.file("session");
  const auto two = shell("printf 'abc\\n\\nde' | ", {"--interactive", "--json", "--save-session", session}, "");
  ASSERT_EQ(two.exit_code, 0) << two.err;
  const auto lines = lines_of(two.out);
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0].at("text").get<std::string>() + lines[1].at("text").get<std::string>(),
            replies({"--prompt", "abc", "--max-tokens", "60", "--save-session", session})
                .at(0)
                .at("text")
                .get<std::string>());
  // The line after a text begins a line of its own.
  EXPECT_EQ(replies({"--prompt", "\nde", "--load-session", session, "--save-session", session}).at(0).at("text"),
            lines[2].at("text"));
}

TEST_F(GenerateCommand, ALineThatIsNotUtf8IsLeftOut) {
  const auto session = folder.file("session");
  const auto result = shell("printf 'abc\\n\\377\\nde\\n' | ", {"--interactive", "--save-session", session}, "");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.err.find("the line: got a byte at 0 that is not UTF-8"), std::string::npos) << result.err;
  const auto sound = shell("printf 'abc\\nde\\n' | ", {"--interactive"}, "");
  EXPECT_EQ(result.out, sound.out);
  EXPECT_TRUE(std::filesystem::exists(session));
}

TEST_F(GenerateCommand, FullDiskUnderTheTextIsAFailure) {
  for (const char* json : {"", " --json"}) {
    const auto result = shell("", {"--prompt", "abc"}, std::string(json) + " > /dev/full");
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.err, "efla: standard output: No space left on device\n");
  }
}

// A run keeps which tokenizer made its tokens.
TEST_F(GenerateCommand, ATokenizerOfAnotherRunIsRefused) {
  std::filesystem::create_directories(folder / "run/checkpoints");
  std::filesystem::rename(model(), folder / "run/checkpoints/step-000010");
  write_text(folder / "run/checkpoints/step-000010/trainer.json", "{}");
  const auto run = [&](const std::string& fingerprint) {
    write_text(folder / "run/run.json",
               json{{"tokenizer", {{"name", "a.model"}, {"fingerprint", fingerprint}, {"vocab_size", 7}}}}.dump());
    return run_program({"generate", folder.file("run"), "--tokenizer", "bytes", "--prompt", "a", "--max-tokens", "1"});
  };
  EXPECT_TRUE(is_user_mistake(run("00"), "--tokenizer: got bytes, which is not the tokenizer of " + folder.file("run") +
                                             ", expected a.model of 7 tokens"));
  EXPECT_EQ(run(data::load_tokenizer("bytes")->info().fingerprint).exit_code, 0);
}

TEST_F(GenerateCommand, CtrlCEndsAReply) {
  const auto out = folder.file("out"), session = folder.file("session");
  const std::string interrupt = " > '" + out + "' & efla=$!; while [ ! -s '" + out +
                                "' ]; do sleep 0.02; kill -0 $efla || exit 99; done; kill -INT $efla; ";
  const Arguments longest{"--max-tokens", "100000000", "--save-session", session};
  const auto with = [&](Arguments more) {
    more.insert(more.begin(), longest.begin(), longest.end());
    return more;
  };
  const auto one = shell("", with({"--prompt", "abc"}), interrupt + "wait $efla");
  EXPECT_EQ(one.exit_code, 130) << one.err;
  EXPECT_NE(one.err.find("session: "), std::string::npos) << one.err;
  EXPECT_EQ(replies({"--load-session", session}).at(0).at("tokens"), 30);

  std::filesystem::remove(out);
  const auto go = folder.file("go");
  const auto dialogue = shell("(echo abc; while [ ! -e '" + go + "' ]; do sleep 0.02; done) | ",
                              with({"--interactive"}), interrupt + "sleep 0.1; touch '" + go + "'; wait $efla");
  EXPECT_EQ(dialogue.exit_code, 0) << dialogue.err;
  EXPECT_NE(dialogue.err.find("session: "), std::string::npos) << dialogue.err;
}

TEST_F(GenerateCommand, SaysWhichCheckpointsOfARunItIgnores) {
  const auto checkpoints = folder / "run/checkpoints";
  std::filesystem::create_directories(checkpoints / "step-000020");
  std::filesystem::rename(model(), checkpoints / "step-000010");
  write_text(checkpoints / "step-000010/trainer.json", "{}");
  for (const Arguments& command : {Arguments{"generate", folder.file("run"), "--prompt", "a", "--max-tokens", "1"},
                                   Arguments{"serve", folder.file("run"), "--host", "192.0.2.1"},
                                   Arguments{"export", folder.file("run"), "--out", folder.file("exported")}}) {
    auto all = command;
    if (command[0] != "export") all.insert(all.end(), {"--tokenizer", "bytes"});
    const auto result = run_program(all);
    EXPECT_NE(result.err.find("efla: " + command[0] + ": " + (checkpoints / "step-000020").string() +
                              " has no model.safetensors: it is ignored\n"),
              std::string::npos)
        << result.err;
  }
}

TEST_F(GenerateCommand, Mistakes) {
  EXPECT_TRUE(is_user_mistake(generate({}), "--prompt"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--interactive"}), "more than one"));
  EXPECT_TRUE(
      is_user_mistake(generate({"--prompt", ""}), "generate: --prompt: got an empty text, expected a text, or --bos"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a\xff"}), "UTF-8"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--stop", ""}), "--stop"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--temperature", "-1"}), "--temperature"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--top-p", "-0.1"}), "--top-p"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--max-tokens", "-3"}), "--max-tokens"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--seed", "-1"}), "--seed"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--tokenizer", folder.file("none")}), "none"));
  EXPECT_TRUE(is_user_mistake(generate({"--prompt", "a", "--save-session", folder.file("no/file")}), "--save-session"));
  EXPECT_TRUE(is_user_mistake(generate({"--load-session", folder.file("none")}), "none"));
  const auto other = folder.file("other.session");
  std::filesystem::create_directory(folder / "another");
  nn::save_language_model(nn::LanguageModel(tiny_model().config(), nn::Initialiser(2)), folder / "another");
  ASSERT_EQ(run_program({"generate", folder.file("another"), "--tokenizer", "bytes", "--prompt", "a", "--max-tokens",
                         "1", "--save-session", other})
                .exit_code,
            0);
  EXPECT_TRUE(is_user_mistake(generate({"--load-session", other}),
                              "generate: --load-session: got " + other + " of the model "));
  EXPECT_TRUE(is_user_mistake(run_program({"generate", folder.file("none"), "--prompt", "a"}), "none"));
  EXPECT_TRUE(is_user_mistake(run_program({"generate", model(), "--prompt", "a"}), "--tokenizer"));

  write_text(folder / "prompts", "a\n\nb\n");
  EXPECT_TRUE(is_user_mistake(generate({"--prompts", folder.file("prompts")}),
                              "an empty prompt in line 2 of " + folder.file("prompts")));
  write_text(folder / "prompts", "a\nb\xff\n");
  EXPECT_TRUE(
      is_user_mistake(generate({"--prompts", folder.file("prompts")}), "prompts, line 2: at byte 3: not UTF-8"));
  write_text(folder / "prompts.jsonl", "{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n");
  EXPECT_TRUE(
      is_user_mistake(generate({"--prompts", folder.file("prompts.jsonl")}), "prompts.jsonl, line 2: at byte 16"));
  write_text(folder / "prompts.jsonl", "{\"prompt\": \"a\"}\n\n{\"prompt\": \"b\"}\n");
  EXPECT_TRUE(is_user_mistake(generate({"--prompts", folder.file("prompts.jsonl")}),
                              "prompts.jsonl, line 2: at byte 16: not JSON"));
  for (const char* blank : {"", "\n \n"}) {
    write_text(folder / "prompts", blank);
    EXPECT_TRUE(is_user_mistake(generate({"--prompts", folder.file("prompts")}), "only blank lines"));
  }

  EXPECT_EQ(replies({"--prompt", "", "--bos"}).at(0).at("prefill_tokens"), 1);
  auto config = tiny_model().config();
  config.vocab_size = 200;
  config.bos_token_id = 1;
  config.eos_token_id = {1};
  std::filesystem::create_directory(folder / "small");
  nn::save_language_model(nn::LanguageModel(config, nn::Initialiser(1)), folder / "small");
  EXPECT_TRUE(is_user_mistake(run_program({"generate", folder.file("small"), "--tokenizer", "bytes", "--prompt", "a"}),
                              "vocabulary"));
}

TEST_F(GenerateCommand, InfoDescribesAModel) {
  const auto info = run_program({"info", model(), "--json"});
  ASSERT_EQ(info.exit_code, 0) << info.err;
  const auto all = json::parse(info.out);
  EXPECT_EQ(all["parameters"], tiny_model().parameter_count());
  EXPECT_EQ(all["bytes_per_token"], 0);
  EXPECT_EQ(all["weight_bytes"], 4 * tiny_model().parameter_count());
  EXPECT_EQ(run_program({"info", "no-such-folder"}).exit_code, 2);
}

TEST_F(GenerateCommand, ContinuesTextsWithModelsOfFamilies) {
  for (const bool olmo : {false, true}) {
    const TempFolder other;
    auto config = nn::random_family_config(olmo, 3);
    config["vocab_size"] = 260;
    config["layer_types"] = {"linear_attention", "full_attention", "linear_attention"};
    config["num_hidden_layers"] = 3;
    const auto tensors = nn::random_family_tensors(config, "model.", 4);
    nn::write_family_folder(other.path(), config, tensors, false, true);
    const Arguments command{"generate", other.path().string(), "--tokenizer", "bytes", "--prompt", "ab"};
    const auto generate = [&](const Arguments& more) {
      Arguments all = command;
      all.insert(all.end(), more.begin(), more.end());
      return run_program(all);
    };
    const auto info = run_program({"info", other.path().string(), "--json"});
    ASSERT_EQ(info.exit_code, 0) << info.err;
    EXPECT_EQ(json::parse(info.out)["model_type"], olmo ? "olmo_hybrid" : "qwen3_5");
    EXPECT_GT(json::parse(info.out)["bytes_per_token"], 0);
    const auto session = other.file("session");
    const auto whole = generate({"--max-tokens", "24", "--json"});
    ASSERT_EQ(whole.exit_code, 0) << whole.err;
    EXPECT_EQ(lines_of(whole.out).front()["tokens"], 24);
    EXPECT_EQ(generate({"--max-tokens", "9", "--save-session", session}).exit_code, 0);
    EXPECT_EQ(generate({"--max-tokens", "9", "--load-session", session}).exit_code, 0);
    EXPECT_EQ(generate({"--max-tokens", "9", "--weights", "int8"}).exit_code, 0);

    config["num_experts"] = 4;
    nn::write_family_folder(other.path(), config, tensors, false, true);
    const auto refused = generate({});
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_NE(refused.err.find("num_experts"), std::string::npos) << refused.err;
  }
}

TEST_F(GenerateCommand, LogitsOfAModelOfAFamily) {
  const TempFolder other;
  const auto config = nn::random_family_config(false, 5);
  nn::write_family_folder(other.path(), config, nn::random_family_tensors(config, "model.", 6), true, false);
  const std::vector<std::int64_t> ids{3, 1, 4, 1, 5, 9, 2, 6};
  const auto write_ids = [&](const std::vector<std::int64_t>& all) {
    const io::ByteView bytes(reinterpret_cast<const std::uint8_t*>(all.data()), all.size() * sizeof(all[0]));
    const std::vector entries{io::NamedTensor{"input_ids", io::TensorType::I64, {2, 4}, bytes}};
    io::write_safetensors(other.file("ids"), entries);
  };
  write_ids(ids);
  const Arguments command{"logits", other.path().string(), "--ids",    other.file("ids"),
                          "--out",  other.file("out"),     "--device", "cpu"};
  const auto result = run_program(command);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const io::SafetensorsFile file(other.file("out"));
  std::vector<float> got(file.find("logits")->bytes.size() / sizeof(float));
  std::memcpy(got.data(), file.find("logits")->bytes.data(), file.find("logits")->bytes.size());
  const nn::FamilyReference reference(other.path());
  auto expected = reference.logits({3, 1, 4, 1});
  const auto second = reference.logits({5, 9, 2, 6});
  expected.insert(expected.end(), second.begin(), second.end());
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4) << i;

  write_ids({1, 2, 3, 4, 5, 6, 7, 1 << 20});
  const auto refused = run_program(command);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("--ids"), std::string::npos) << refused.err;
}

}  // namespace
}  // namespace efla::test
