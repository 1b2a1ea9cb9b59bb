// Numbers of drafts that are learnt by trying them: what tries cost, and what they find.
#include "check.h"
#include "engine/budget.h"
#include "engine/budget_bandit.h"

namespace specdec {
namespace {

// A request that drafts alone, of whose drafts `right` are accepted in every step.
struct LoneDrafter {
  SizeBandit shared{16, 16};
  SizeBandit own{&shared};
  Budget budget;
  StepCost cost{{1, 2, 32}, {1.0, 1.2, 7.2}};
  int steps = 0, tries = 0, paid = 0;
  double lost = 0.0;  // by tries, in tokens that would have come in their time

  void run(int count, int right) {
    steps = tries = paid = 0;
    lost = 0.0;
    for (; steps < count; ++steps) {
      const StepBase step{cost, 1, 1.0};
      Offer offer = own.offer();
      budget.cut({&offer, 1}, step);
      const int arm = own.settle(offer.chosen, step), drafts = own.drafts(arm);
      const int accepted = drafts < right ? drafts : right;
      paid += offer.chosen != 0;
      if (arm != offer.chosen) {
        ++tries;
        lost += (cost(1.0 + drafts) - cost(1.0)) / cost(1.0) - accepted;
      }
      own.observe_step(arm, drafts, accepted);
    }
  }
};

TEST(tries_of_drafts_that_are_never_right_cost_one_percent) {
  LoneDrafter drafter;
  drafter.run(1000, 0);  // learns that they are not
  drafter.run(50000, 0);
  CHECK(drafter.paid == 0 && drafter.tries > 100);
  CHECK(drafter.lost > 0.002 * drafter.steps && drafter.lost < 0.0101 * drafter.steps);
}

TEST(tries_find_drafts_that_have_become_right) {
  LoneDrafter drafter;
  drafter.run(2000, 0);
  drafter.run(400, 4);
  CHECK(drafter.paid > 0);
  drafter.run(400, 4);
  CHECK(drafter.paid > 360);
}

}  // namespace
}  // namespace specdec
