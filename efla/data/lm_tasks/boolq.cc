// BoolQ: yes-or-no questions about a passage.
#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

MultipleChoice boolq_example(const io::Fields& record) {
  // In SuperGLUE, whose copy the harness reads, the title is part of the passage.
  const auto passage = text_of(record, "title") + " -- " + text_of(record, "passage");
  return choose_answer(passage + "\nQuestion: " + text_of(record, "question") + "?\nAnswer:", {"no", "yes"},
                       record.get<bool>("answer") ? 1 : 0);
}

}  // namespace efla::data
