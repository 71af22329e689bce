// SPDX-License-Identifier: Apache-2.0
// CASE 0 compiles; each other case must not, for the reason its comment gives.
#include <utility>

#include "cache_groups.h"
#include "ledger.h"
#include "sequence.h"

using namespace tokenspeed::control;

void end(FullAttentionGroup& group, SeatPool& seats, const StepLedger& ledger, Sequence& sequence) {
  const Retirement retirement = ledger.retirement(sequence.grant().seat());
#if CASE == 0
  Grant grant = sequence.leave(retirement);
  group.give_back(grant.leave_pages(retirement), retirement);
  seats.release(grant.leave_seat(retirement), retirement);
#elif CASE == 1  // pages in flight come back through the ledger's retirement only
  Grant grant = sequence.leave(retirement);
  group.give_back(grant.leave_pages(retirement));
#elif CASE == 2  // nobody but the ledger makes a retirement
  Grant grant = sequence.leave(Retirement(Seat(0)));
#elif CASE == 3  // only admission mints a grant
  Grant grant(AdmissionKey(), seats.take(), PageTable());
#elif CASE == 4  // no owning state is made from outside, even with a grant
  Grant grant = sequence.leave(retirement);
  Sequence::State state = Prefilling(StateKey(), std::move(grant));
#elif CASE == 5  // a grant cannot be duplicated
  Grant grant = sequence.leave(retirement);
  Grant twin = grant;
#elif CASE == 6  // what a sequence leaves cannot be dropped silently
  sequence.leave(retirement);
#elif CASE == 7  // seats and slots do not mix
  (void)ledger.is_idle(Slot(0));
#endif
}
