// WinoGrande: which person a blank stands for. The sentence up to the blank, with either option, is the context of the
// rest ("partial evaluation": Trinh and Le, "A simple method for commonsense reasoning", 2018).
#include "efla/data/lm_tasks/readers.h"
#include "efla/data/lm_tasks/text.h"

namespace efla::data {

MultipleChoice winogrande_example(const io::Fields& record) {
  const auto sentence = text_of(record, "sentence");
  const auto blank = sentence.find('_');
  if (blank == std::string::npos) record.refuse("sentence", "a text with a blank '_'");
  const std::string before = sentence.substr(0, blank);
  const std::string after(strip(std::string_view(sentence).substr(blank + 1)));
  if (after.empty()) record.refuse("sentence", "a text after the blank '_'");
  MultipleChoice example;
  for (const char* option : {"option1", "option2"}) {
    const auto context = before + text_of(record, option);
    example.choices.push_back({context, " " + after, count_characters(after)});
  }
  example.gold = place_of(record, "answer", text_of(record, "answer"), {"1", "2"});
  return example;
}

}  // namespace efla::data
