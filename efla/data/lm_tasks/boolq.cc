// BoolQ: questions of yes and no about a passage.
#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

MultipleChoice boolq_example(const Record& record) {
  // SuperGLUE, whose copy the harness reads, has the title in the passage.
  const auto passage = record.text("title") + " -- " + record.text("passage");
  return choose_answer(passage + "\nQuestion: " + record.text("question") + "?\nAnswer:", {"no", "yes"},
                       record.flag("answer") ? 1 : 0);
}

}  // namespace efla::data
